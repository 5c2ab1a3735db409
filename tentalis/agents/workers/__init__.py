"""Workers. In: tasks of one environment. Out: results with the exact tokens, log-probs and policy of each sample.

Begin reading with `Worker` in `process`; `answer` turns one task into its results.
"""

from tentalis.agents.workers.process import WorkerOptions, run

__all__ = ["WorkerOptions", "run"]
