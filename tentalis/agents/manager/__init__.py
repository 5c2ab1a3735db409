"""The manager. In: the records of one run. Out: tasks, at the pace of the trainer, and the simulated users' feedback.

Begin reading with `RunState` in `core` (pure); `process` is the loop around it.
"""

from tentalis.agents.manager.process import ManagerOptions, run

__all__ = ["ManagerOptions", "run"]
