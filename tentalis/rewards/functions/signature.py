"""The calling conventions of reward functions, recognised by the names of the parameters. Pure.

| convention | called with |
|---|---|
| `trl` | `prompts`, `completions`, `completion_ids`, the columns, each a list of one; `log_extra`, `log_metric` |
| `verl` | `data_source`, `solution_str`, `ground_truth`, `extra_info` |
| `verifiers` | `prompt`, `completion`, `answer`, `info`, `state`, `task`, and the row's columns |
| `tentalis` | `task` and `result`, the two records |

Only the parameters that a function has are passed. A function with `**kwargs` gets all of them.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Convention = Literal["trl", "verl", "verifiers", "tentalis"]

TRL_OWN = frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"})
VERL_OWN = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
VERIFIERS_OWN = frozenset({"prompt", "completion", "answer", "info", "state", "task"})
_TRL_MARKS = frozenset({"prompts", "completions", "completion_ids"})
_VERIFIERS_MARKS = frozenset({"prompt", "completion"})
_WEAK_VERIFIERS_MARKS = frozenset({"state", "answer", "info"})
_NOT_GIVEN = frozenset({"trainer_state", "environments"})
_USAGE = (
    "a reward function has one of these signatures: TRL f(prompts, completions, completion_ids, **columns), "
    "verl compute_score(data_source, solution_str, ground_truth, extra_info), "
    "verifiers f(prompt, completion, answer, info, state) with any of these, or f(task, result)"
)


class UnknownSignature(ValueError):
    """The parameters of a function fit no convention, or more than one."""


@dataclass(frozen=True, slots=True)
class Signature:
    """`convention`: the way in which a function is called. `required`: parameters without a default. `optional`: those
    with one. `everything`: the function has `**kwargs`. `coroutine`: calling it gives a coroutine."""

    convention: Convention
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    everything: bool = False
    coroutine: bool = False

    def wants(self, name: str) -> bool:
        """Returns True if the function takes an argument of this name."""
        return self.everything or name in self.required or name in self.optional

    @property
    def columns(self) -> frozenset[str]:
        """The columns of a row without which the function cannot be called."""
        if self.convention == "tentalis":
            return frozenset()
        if self.convention == "trl":
            return self.required - TRL_OWN
        if self.convention == "verl":
            return self.required & {"data_source", "ground_truth"}
        return self.required - (VERIFIERS_OWN - {"answer"})


def signature_of(function: Callable[..., Any]) -> Signature:
    """Returns the convention of a function. Raises UnknownSignature."""
    try:
        found = inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise UnknownSignature(f"its parameters cannot be read ({error}); wrap it in a function; {_USAGE}") from error
    call = getattr(function, "__call__", None)  # noqa: B004 - the method of an object, which may be a coroutine
    coroutine = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(call)
    return classify(found.parameters.values(), coroutine=coroutine)


def classify(parameters: Iterable[inspect.Parameter], *, coroutine: bool = False) -> Signature:
    """Returns the convention of a function with these parameters. Raises UnknownSignature."""
    parameters = list(parameters)
    unnamed = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    if unnamed:
        raise UnknownSignature(
            f"arguments are passed by name, and {_words(unnamed)} can only be passed by position: remove the /"
        )
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = frozenset(each.name for each in named if each.default is each.empty)
    optional = frozenset(each.name for each in named if each.default is not each.empty)
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    convention = _convention(required | optional, required, everything)
    _check_arguments(convention, required, required | optional, everything)
    return Signature(convention, required, optional, everything, coroutine)


def _convention(names: frozenset[str], required: frozenset[str], everything: bool) -> Convention:
    marks: dict[Convention, frozenset[str]] = {
        "trl": names & _TRL_MARKS,
        "verl": names & {"solution_str"},
        "verifiers": names & _VERIFIERS_MARKS,
        "tentalis": frozenset({"task", "result"}) if required == {"task", "result"} else frozenset(),
    }
    found = [convention for convention, marked in marks.items() if marked]
    if not found and names & _WEAK_VERIFIERS_MARKS:
        found = ["verifiers"]
    if len(found) == 1:
        return found[0]
    if found:
        reasons = "; ".join(f"{_words(marks[each])} is of {each}" for each in found)
        raise UnknownSignature(f"its parameters mix conventions: {reasons}; {_USAGE}")
    shown = ", ".join([*sorted(names), *(["**kwargs"] if everything else [])]) or "none"
    raise UnknownSignature(
        f"its parameters ({shown}) fit no convention: not TRL (no prompts, completions or completion_ids), "
        "not verl (no solution_str), not verifiers (no prompt, completion, answer, info or state), "
        f"not tentalis (not exactly task and result); {_USAGE}"
    )


def _check_arguments(convention: Convention, required: frozenset[str], names: frozenset[str], everything: bool) -> None:
    """Raises UnknownSignature if the function asks for what it cannot get, or never gets the answer."""
    if convention in ("trl", "verifiers") and required & _NOT_GIVEN:
        raise UnknownSignature(
            f"it asks for {_words(required & _NOT_GIVEN)}: a reward may depend only on the row and the answer, "
            "because a result can be scored again later; give the parameter a default"
        )
    if convention == "verl" and required - VERL_OWN:
        raise UnknownSignature(
            f"it has solution_str, as verl does, and also asks for {_words(required - VERL_OWN)}, which verl takes "
            "from reward_kwargs: give these parameters defaults, or wrap the function in one that sets them"
        )
    carriers = {
        "trl": {"completions", "completion_ids"},
        "verifiers": {"completion", "state"},
        "verl": {"solution_str"},
        "tentalis": {"result"},
    }[convention]
    if not everything and not names & carriers:
        raise UnknownSignature(
            f"its parameters are those of {convention}, but none of them is the answer: add {_words(carriers, 'or')}"
        )


def _words(names: Iterable[str], last: str = "and") -> str:
    *rest, end = sorted(names)
    return f"{', '.join(rest)} {last} {end}" if rest else end
