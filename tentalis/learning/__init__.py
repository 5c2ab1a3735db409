"""`tentalis learn`: trains a model on the user's own prompts with the user's own reward function.

In: a file of prompts, reward functions, a model. Out: a run on the log, an adapter, and the reward before and after on
held-out prompts. Begin reading in `play.py`; `sources.py` and `columns.py` read the data, `runs.py` begins a run.
"""

from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions

__all__ = ["LearnError", "LearnOptions"]
