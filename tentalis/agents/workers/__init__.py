"""Workers. In: tasks of one environment. Out: results with the exact tokens, log-probs and policy of each sample.

Begin reading with `Worker` in `process`; `answer` turns one task into its results by one completion each, `episodes` by
an episode each.
"""

from tentalis.agents.workers.episodes import EpisodeLimits
from tentalis.agents.workers.process import WorkerOptions, run

__all__ = ["EpisodeLimits", "WorkerOptions", "run"]
