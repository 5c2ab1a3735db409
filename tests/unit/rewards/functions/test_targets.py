"""Targets of reward functions: what a name may stand for, and the form of completions that a function reads."""

import os
import sys
import types
import uuid
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from tentalis.rewards.functions.targets import BadFunctionName, functions_of, module_of, reads_messages, split
from tests.support import bad_rewards


def test_a_target_is_a_file_or_module_and_a_name() -> None:
    assert split("a/b:c.py:score") == ("a/b:c.py", "score")
    assert split("pack.rewards:score") == ("pack.rewards", "score")
    for target in ("rewards.py", ":score", "rewards.py:", "rewards.py:a b"):
        with pytest.raises(BadFunctionName, match=r"is not FILE\.py:FUNCTION"):
            split(target)


def test_a_rubric_stands_for_its_functions() -> None:
    brief, parsed = functions_of(bad_rewards, "bad_rewards.py", "rubric", "auto")
    assert (brief.name, brief.weight, dict(brief.given)) == ("brief", 1.0, {})
    assert (parsed.name, parsed.weight, dict(parsed.given)) == ("parsed", 0.5, {"parser": str.upper})
    assert parsed.signature.columns == {"answer"} and parsed.place.endswith("bad_rewards.py:94")


def test_a_file_is_what_it_is_now_even_if_its_size_and_time_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / f"{uuid.uuid4().hex}.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n", encoding="utf-8")
        os.utime(file, (1, 1))
        assert value == module_of(str(file)).VALUE
        del sys.modules[file.stem]


def test_a_file_with_the_name_of_a_module_of_python_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "asyncio.py"
    file.write_text("def score(completion): return 1.0\n")
    with pytest.raises(BadFunctionName, match=r"asyncio\.py: Python has a module asyncio: .* rename the file"):
        module_of(str(file))


class Score: ...


def strange(text: str, label: str) -> None: ...


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Score, r"score is a class: name a function, or an object of it"),
        (1, r"rewards\.py: score is int, not a function"),
        (strange, r"test_targets\.py:\d+: score cannot be called: its parameters"),
    ],
)
def test_other_things_are_refused(value: Any, says: str) -> None:
    module = types.ModuleType("rewards")
    vars(module)["score"] = value
    with pytest.raises(BadFunctionName, match=says):
        list(functions_of(module, "rewards.py", "score", "auto"))
    with pytest.raises(BadFunctionName, match=r"rewards\.py has no scores; it has"):
        list(functions_of(module, "rewards.py", "scores", "auto"))


def _attribute(completion: Any) -> Any:
    return completion[-1].content


def _judged(completions: Any) -> Any:
    return [ask(completion).content for completion in completions]


def ask(text: str) -> Any: ...


def test_an_attribute_content_means_messages_for_verifiers_only() -> None:
    assert reads_messages(_attribute)
    assert not reads_messages(_judged)


def _content(completion: Any) -> Any:
    return completion[0]["content"]


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inner(**arguments: Any) -> Any:
        return function(**arguments)

    return inner


def direct(completions: Any) -> Any:
    return [len(each[0]["content"]) for each in completions]


def by_helper(completion: Any, least: int = 1) -> Any:
    return max(map(len, _content(completion)), default=least)


def text(completions: Any) -> Any:
    return [len(each) for each in completions]


def annotated(completions: list[list[dict[str, str]]]) -> Any:
    return completions


def annotated_text(completion: str) -> Any:
    return {"content": completion}


@pytest.mark.parametrize("function", [direct, by_helper, annotated, _logged(direct), partial(by_helper, least=2)])
def test_a_function_that_reads_content_gets_messages(function: Callable[..., Any]) -> None:
    assert reads_messages(function)


@pytest.mark.parametrize("function", [text, annotated_text, _logged(text)])
def test_others_get_text(function: Callable[..., Any]) -> None:
    assert not reads_messages(function)
