"""Custom scorers, named in the file of scorers as `module:function`."""

import importlib
import inspect
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.records import Result, Task
from tentalis.rewards.naming import versioned
from tentalis.rewards.verdict import CallSeconds, FeedbackJudge, Judge, Scorer, Verdict


class BadTarget(Exception):
    """A `module:function` that cannot be imported or is not a scorer."""


class CustomSettings(BaseModel):
    """Settings of a custom scorer.

    `target` is a scorer object, or a function of (task, result) that returns a reward in [-1, 1], a Verdict, or None
    for unknown; it may be a coroutine function. `version` is the version of a function: change it when the function's
    rewards change. `time_limit_s` limits one call of a function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["custom"]
    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    version: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "1"
    time_limit_s: CallSeconds = 60.0


class _FunctionScorer:
    slow = True
    """A custom function may block, so it runs in a thread."""

    def __init__(self, function: Any, settings: CustomSettings) -> None:
        self._function = function
        self.name = versioned(f"{settings.target}/{settings.version}", settings)
        self.time_limit_s = settings.time_limit_s

    def check(self, task: Task) -> None:
        """Accepts every task."""

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns the function's verdict."""
        return _verdict(self._function(task, result))

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns None: a function only grades."""
        return None


class _CoroutineScorer:
    def __init__(self, function: Any, settings: CustomSettings) -> None:
        self._function = function
        self.name = versioned(f"{settings.target}/{settings.version}", settings)
        self.time_limit_s = settings.time_limit_s

    def check(self, task: Task) -> None:
        """Accepts every task."""

    async def judge(self, task: Task, result: Result) -> Verdict:
        """Returns the coroutine's verdict."""
        return _verdict(await self._function(task, result))


def _verdict(value: Any) -> Verdict:
    if isinstance(value, Verdict):
        return value
    if value is None:
        return Verdict.unknown()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a scorer returned {value!r}: it must return a number, a Verdict or None")
    return Verdict(float(value))


def custom_scorer(settings: CustomSettings) -> Scorer:
    """Returns the scorer that `target` names. Raises BadTarget."""
    module, _, name = settings.target.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadTarget(f"{settings.target}: the module cannot be imported: {error}") from error
    except AttributeError as error:
        raise BadTarget(f"{settings.target}: the module {module} has no {name}") from error
    if inspect.isclass(target):
        raise BadTarget(f"{settings.target} is a class: name an instance of it, or a function")
    if inspect.iscoroutinefunction(target):
        return _CoroutineScorer(target, settings)
    if isinstance(target, Judge | FeedbackJudge):
        return target
    if all(hasattr(target, name) for name in ("name", "slow", "check", "verify", "complaint")):
        verifier: Scorer = target
        return verifier
    if callable(target):
        return _FunctionScorer(target, settings)
    raise BadTarget(f"{settings.target} is neither a scorer nor a function")
