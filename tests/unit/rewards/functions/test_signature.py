"""Conventions of reward functions: those of TRL, verl, verifiers and ours, and what is refused with the reason."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tentalis.rewards.functions.arguments import Call, Logged, arguments, missing_columns
from tentalis.rewards.functions.signature import Signature, UnknownSignature, signature_of

CALL = Call(
    messages=[{"role": "user", "content": "2 + 2?"}],
    text="4",
    token_ids=[7, 8],
    columns={"answer": "4", "level": 3, "prompt": "not this one"},
    environment="chat",
)


def trl(prompts: Any, completions: Any, completion_ids: Any, level: Any, **kwargs: Any) -> None: ...
def trl_short(completions: Any, answer: Any) -> None: ...
def trl_kwargs(completions: Any, **kwargs: Any) -> None: ...
def trl_state(completions: Any, trainer_state: Any = None) -> None: ...
def trl_logs(completions: Any, log_extra: Any, log_metric: Any) -> None: ...
def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> None: ...
def verl_short(solution_str: Any, ground_truth: Any, method: str = "strict") -> None: ...
def verl_kwargs(solution_str: Any, **kwargs: Any) -> None: ...
async def verifiers(completion: Any, answer: Any, state: Any) -> None: ...
def verifiers_state(state: Any) -> None: ...
def verifiers_all(
    prompt: Any, completion: Any, answer: Any, info: Any, state: Any, task: Any, **kwargs: Any
) -> None: ...
def with_column(completion: Any, level: Any) -> None: ...
def ours(task: Any, result: Any) -> None: ...


class Scores:
    async def __call__(self, completion: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "convention", "columns"),
    [
        (trl, "trl", {"level"}),
        (trl_short, "trl", {"answer"}),
        (trl_kwargs, "trl", set()),
        (trl_state, "trl", set()),
        (trl_logs, "trl", set()),
        (verl, "verl", {"data_source", "ground_truth"}),
        (verl_short, "verl", {"ground_truth"}),
        (verl_kwargs, "verl", set()),
        (verifiers, "verifiers", {"answer"}),
        (verifiers_state, "verifiers", set()),
        (verifiers_all, "verifiers", {"answer"}),
        (with_column, "verifiers", {"level"}),
        (ours, "tentalis", set()),
        (Scores(), "verifiers", set()),
        (partial(verl_short, method="loose"), "verl", {"ground_truth"}),
    ],
)
def test_a_convention_is_recognised_by_the_names_of_parameters(
    function: Callable[..., Any], convention: str, columns: set[str]
) -> None:
    found = signature_of(function)
    assert (found.convention, set(found.columns)) == (convention, columns)
    assert found.coroutine == (function is verifiers or isinstance(function, Scores))


def unnamed(completion: Any, /) -> None: ...
def mixed(completions: Any, solution_str: Any) -> None: ...
def half_mixed(prompts: Any, completion: Any) -> None: ...
def unknown(text: Any, label: Any) -> None: ...
def nothing(**kwargs: Any) -> None: ...
def deaf_trl(prompts: Any) -> None: ...
def deaf_verifiers(prompt: Any, answer: Any) -> None: ...
def progress(completions: Any, trainer_state: Any) -> None: ...
def reward_kwargs(solution_str: Any, url: Any) -> None: ...
def three(task: Any, result: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (unnamed, "completion can only be passed by position"),
        (mixed, "completions is of trl; solution_str is of verl"),
        (half_mixed, "prompts is of trl; completion is of verifiers"),
        (unknown, r"\(label, text\) fit no convention: not TRL \(no prompts.*not verl.*not verifiers.*not tentalis"),
        (nothing, r"\(\*\*kwargs\) fit no convention"),
        (deaf_trl, "none of them is the answer: add completion_ids or completions"),
        (deaf_verifiers, "none of them is the answer: add completion or state"),
        (progress, "asks for trainer_state: .*give the parameter a default"),
        (reward_kwargs, "also asks for url, which verl takes from reward_kwargs"),
        (three, r"not tentalis \(not exactly task and result\)"),
    ],
)
def test_other_signatures_are_refused_with_what_was_tried(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(UnknownSignature, match=says):
        signature_of(function)


def given(function: Callable[..., Any], call: Call = CALL, *, messages: bool = False) -> dict[str, Any]:
    return arguments(signature_of(function), call, messages=messages, logged=Logged())


def test_trl_gets_lists_of_one_and_the_columns() -> None:
    assert given(trl_short) == {"completions": ["4"], "answer": ["4"]}
    found = given(trl)
    assert found["prompts"] == ["2 + 2?"] and found["completion_ids"] == [[7, 8]] and found["level"] == [3]
    # TRL leaves these columns out, and gives no argument that the function does not have.
    assert "prompt" not in found and given(trl_state) == {"completions": ["4"]}


def test_completions_are_messages_for_functions_of_conversations() -> None:
    message = [{"role": "assistant", "content": "4"}]
    found = given(trl, messages=True)
    assert found["completions"] == [message] and found["prompts"] == [[{"role": "user", "content": "2 + 2?"}]]
    assert given(verifiers, messages=True)["completion"] == message
    assert given(verifiers, messages=True)["state"]["completion"] == message


def test_verl_gets_its_columns_and_the_nested_ground_truth() -> None:
    columns = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"i": 1}}
    call = Call(CALL.messages, "4", [], columns)
    assert given(verl, call) == {
        "data_source": "gsm8k",
        "solution_str": "4",
        "ground_truth": "4",
        "extra_info": {"i": 1, "num_turns": 1, "rollout_reward_scores": {}},
    }
    # verl reads the nested one, whatever else the row has.
    both = Call(CALL.messages, "4", [], {**columns, "ground_truth": "5", "extra_info": None})
    assert given(verl, both)["ground_truth"] == "4" and "i" not in given(verl, both)["extra_info"]
    plain = Call(CALL.messages, "4", [], {"data_source": "gsm8k", "ground_truth": "5"})
    assert given(verl, plain)["ground_truth"] == "5"


def test_messages_are_read_by_key_and_by_attribute_as_in_verifiers() -> None:
    found = given(verifiers_all, messages=True)
    (message,) = found["completion"]
    assert (message.role, message.content, message["content"]) == ("assistant", "4", "4")
    assert found["prompt"][0].content == found["state"]["prompt"][0].content == "2 + 2?"
    assert message == {"role": "assistant", "content": "4"} and json.dumps(message).endswith('"4"}')
    assert message.tool_calls is None and message.reasoning_content is None
    with pytest.raises(AttributeError, match="a message has no 'contents'; it has role, content"):
        message.contents  # noqa: B018


def test_verifiers_get_info_and_a_state_that_holds_the_row() -> None:
    found = given(verifiers_all)
    assert found["info"] == {} and found["task"] == "chat" and found["level"] == 3 and found["prompt"] == "2 + 2?"
    assert given(verifiers_state)["state"] | {"x": 1} == {**found["state"], "x": 1}
    assert found["state"]["answer"] == "4" and found["state"]["completion"] == "4"


def test_columns_that_a_row_does_not_have_are_named() -> None:
    assert missing_columns(signature_of(verl), {"ground_truth": 1}) == ["data_source"]
    assert missing_columns(signature_of(verl), {"data_source": 1, "reward_model": {"ground_truth": None}}) == []
    assert missing_columns(signature_of(with_column), {"levels": 1}) == ["level"]


def test_a_function_of_both_records_gets_them() -> None:
    call = Call(CALL.messages, "4", [], {}, records=("the task", "the result"))
    assert arguments(Signature("tentalis", frozenset({"task", "result"})), call, messages=False, logged=Logged()) == {
        "task": "the task",
        "result": "the result",
    }
