"""Workers: they take tasks, answer them with a model, and record exactly what was sampled by whom."""

from tentalis.workers.process import WorkerOptions, run

__all__ = ["WorkerOptions", "run"]
