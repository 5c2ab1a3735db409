"""Scorers of one's own, named in the file of scorers as `module:function`."""

import importlib
import inspect
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.records import Result, Task
from tentalis.rewards.naming import versioned
from tentalis.rewards.verdict import CallSeconds, FeedbackJudge, Judge, Scorer, Verdict


class BadTarget(Exception):
    """A `module:function` that cannot be imported or is no scorer."""


class CustomSettings(BaseModel):
    """`target` is a scorer object, or a function of (task, result) that returns a reward in [-1, 1], a Verdict, or None
    for unknown; it may be a coroutine function. A function gets its version here: change it when what it says changes.
    `time_limit_s` is that of one call of a function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["custom"]
    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    version: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "1"
    time_limit_s: CallSeconds = 60.0


class _Function:
    slow = True
    """It may do anything, so it is called in a thread."""

    def __init__(self, function: Any, settings: CustomSettings) -> None:
        self._function = function
        self.name = versioned(f"{settings.target}/{settings.version}", settings)
        self.time_limit_s = settings.time_limit_s

    def check(self, task: Task) -> None:
        """Every task will do."""

    def verify(self, task: Task, result: Result) -> Verdict:
        """What the function says."""
        return _verdict(self._function(task, result))

    def complaint(self, task: Task, result: Result) -> str | None:
        """Nothing: a function grades."""
        return None


class _Coroutine:
    def __init__(self, function: Any, settings: CustomSettings) -> None:
        self._function = function
        self.name = versioned(f"{settings.target}/{settings.version}", settings)
        self.time_limit_s = settings.time_limit_s

    def check(self, task: Task) -> None:
        """Every task will do."""

    async def judge(self, task: Task, result: Result) -> Verdict:
        """What the coroutine says."""
        return _verdict(await self._function(task, result))


def _verdict(said: Any) -> Verdict:
    if isinstance(said, Verdict):
        return said
    if said is None:
        return Verdict.unknown()
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise TypeError(f"a scorer returned {said!r}: a number, a Verdict or None is expected")
    return Verdict(float(said))


def custom(settings: CustomSettings) -> Scorer:
    """The scorer that `target` names. Raises BadTarget."""
    module, _, name = settings.target.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadTarget(f"{settings.target}: the module cannot be imported: {error}") from error
    except AttributeError as error:
        raise BadTarget(f"{settings.target}: the module {module} has no {name}") from error
    if inspect.isclass(target):
        raise BadTarget(f"{settings.target} is a class: name an object of it, or a function")
    if inspect.iscoroutinefunction(target):
        return _Coroutine(target, settings)
    if isinstance(target, Judge | FeedbackJudge):
        return target
    if all(hasattr(target, name) for name in ("name", "slow", "check", "verify", "complaint")):
        verifier: Scorer = target
        return verifier
    if callable(target):
        return _Function(target, settings)
    raise BadTarget(f"{settings.target} is neither a scorer nor a function")
