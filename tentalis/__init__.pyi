from tentalis.python.learn import learn as learn
from tentalis.python.learn import learn_async as learn_async
from tentalis.python.learned_run import LearnedRun as LearnedRun
