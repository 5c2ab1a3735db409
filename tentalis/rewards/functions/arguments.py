"""The arguments of one call of a reward function, made from a row and an answer. Pure; used in the function's process.

Each call gets its own arguments, so that a function which changes them changes nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tentalis.rewards.functions.signature import Signature

Messages = list[dict[str, str]]
_UNSET = frozenset({"tool_calls", "reasoning_content", "thinking_blocks"})


class MessageDict(dict[str, str]):
    """A message that is read by key and, as those of verifiers, by attribute."""

    def __getattr__(self, name: str) -> str | None:
        if name in self:
            return self[name]
        if name in _UNSET:
            return None
        raise AttributeError(f"a message has no {name!r}; it has {', '.join(self)}")


@dataclass(frozen=True, slots=True)
class Call:
    """One answer to score. `columns`: the row's, without the prompt. `records`: the task and the result, for a function
    of both."""

    messages: Messages
    text: str
    token_ids: list[int]
    columns: dict[str, Any]
    environment: str = ""
    turns: int = 1
    records: tuple[Any, Any] | None = None


@dataclass(slots=True)
class Logged:
    """The values that a function passed to TRL's `log_metric` and `log_extra`."""

    metrics: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def log_metric(self, name: str, value: Any) -> None:
        """Keeps a number: it becomes a component of the Score."""
        self.metrics[str(name)] = value

    def log_extra(self, column: str, values: Any) -> None:
        """Keeps a column of one value."""
        self.extras[str(column)] = values


def arguments(signature: Signature, call: Call, *, messages: bool, logged: Logged) -> dict[str, Any]:
    """Returns the arguments by name. `messages`: the completion is a list of messages, else a text.

    A required column that the row does not have is left out: `missing_columns` names it beforehand.
    """
    make: Mapping[str, Callable[[], dict[str, Any]]] = {
        "trl": lambda: _trl(call, messages, logged),
        "verl": lambda: _verl(call),
        "verifiers": lambda: _verifiers(call, messages),
        "tentalis": lambda: _records(call),
    }
    given = make[signature.convention]()
    return {name: value for name, value in given.items() if signature.wants(name)}


def missing_columns(signature: Signature, columns: Mapping[str, Any]) -> list[str]:
    """Returns the names of required columns that a row does not have."""
    missing = signature.columns - columns.keys()
    if signature.convention == "verl" and _nested_truth(columns) is not None:
        missing -= {"ground_truth"}
    return sorted(missing)


def plain_prompt(messages: Messages) -> str:
    """Returns a prompt as text: the content of its only message, else the contents of all with blank lines between."""
    return "\n\n".join(message["content"] for message in messages)


def _prompt(call: Call, messages: bool) -> Any:
    return [MessageDict(message) for message in call.messages] if messages else plain_prompt(call.messages)


def _completion(call: Call, messages: bool) -> Any:
    return [MessageDict(role="assistant", content=call.text)] if messages else call.text


def _trl(call: Call, messages: bool, logged: Logged) -> dict[str, Any]:
    own = {"prompt", "completion", "completion_ids"}
    return {name: [value] for name, value in call.columns.items() if name not in own} | {
        "prompts": [_prompt(call, messages)],
        "completions": [_completion(call, messages)],
        "completion_ids": [call.token_ids],
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }


def _verl(call: Call) -> dict[str, Any]:
    columns = call.columns
    given = {name: columns[name] for name in ("data_source", "ground_truth") if name in columns}
    if (nested := _nested_truth(columns)) is not None:
        given["ground_truth"] = nested[0]
    extra = columns.get("extra_info")
    if extra is None:
        extra = {}
    if isinstance(extra, dict):
        extra = {**extra, "num_turns": call.turns, "rollout_reward_scores": {}}
    return given | {"solution_str": call.text, "extra_info": extra}


def _nested_truth(columns: Mapping[str, Any]) -> tuple[Any] | None:
    """Returns the ground truth in the column `reward_model`, as verl's data sets have it, in a tuple; else None."""
    nested = columns.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        return (nested["ground_truth"],)
    return None


def _verifiers(call: Call, messages: bool) -> dict[str, Any]:
    prompt, completion = _prompt(call, messages), _completion(call, messages)
    given = dict(call.columns)
    given.setdefault("task", call.environment)
    if given.get("info") is None:
        given["info"] = {}
    state = {**given, "prompt": prompt, "completion": completion, "turn": call.turns}
    return given | {"prompt": prompt, "completion": completion, "state": state}


def _records(call: Call) -> dict[str, Any]:
    assert call.records is not None, "the parent sends the records to a function of task and result"
    return {"task": call.records[0], "result": call.records[1]}
