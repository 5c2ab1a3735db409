"""The manager: it issues tasks at the pace of the trainer and speaks for the simulated users."""

from tentalis.manager.process import ManagerOptions, run

__all__ = ["ManagerOptions", "run"]
