"""Errors of reward functions. Each message names the file and line of the user's code."""


class BadFunction(Exception):
    """A reward function that cannot be used: it is missing, cannot be imported, or has an unknown signature."""


class ProcessNotStarted(BadFunction):
    """The process of a reward function does not start."""


class FunctionError(Exception):
    """A call of a reward function failed. `traceback`: the user's frames; '' if there is none."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class FunctionTimeout(FunctionError, TimeoutError):
    """A call of a reward function took longer than its limit."""


class OutOfRange(FunctionError):
    """A reward outside the range of the scorer."""
