"""Prompts of rows: text, messages, a system prompt, verl's columns, other names."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.learning.columns import MOST_BYTES, UnusableRow, prompt_of

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip)
USER = {"role": "user", "content": "Why?"}


@given(prompt=TEXTS, others=st.dictionaries(TEXTS, st.none() | st.integers() | TEXTS))
def test_every_other_column_reaches_the_reward_and_the_line_keeps_all(prompt: str, others: dict[str, Any]) -> None:
    others = {name: value for name, value in others.items() if name not in ("prompt", "system")}
    made, line = prompt_of({"prompt": prompt, **others}, 7)
    assert made == Prompt((("user", prompt),), others, 7)
    assert Prompt.of_line(line) == made
    assert line.endswith(b"\n") and line.count(b"\n") == 1


def test_messages_and_a_system_prompt() -> None:
    made, _ = prompt_of({"messages": [USER], "system": "Be short.", "answer": 1}, 1)
    assert made == Prompt((("system", "Be short."), ("user", "Why?")), {"answer": 1}, 1)
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert prompt_of({"prompt": [{"role": "user", "content": parts}]}, 1)[0].messages == (("user", "Why?"),)


def test_the_prompt_comes_before_messages_which_reach_the_reward() -> None:
    made, _ = prompt_of({"prompt": "Why?", "messages": [USER]}, 1)
    assert made == Prompt((("user", "Why?"),), {"messages": [USER]}, 1)


def test_a_row_of_verl() -> None:
    others = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    made, _ = prompt_of({"prompt": [USER], **others}, 1)
    assert made == Prompt((("user", "Why?"),), others, 1)


def test_other_names() -> None:
    made, _ = prompt_of({"question": "Why?", "target": 4}, 1, {"question": "prompt", "target": "answer"})
    assert made == Prompt((("user", "Why?"),), {"answer": 4}, 1)
    swapped, _ = prompt_of({"prompt": "4", "q": "Why?"}, 1, {"prompt": "answer", "q": "prompt"})
    assert swapped == Prompt((("user", "Why?"),), {"answer": "4"}, 1)


@pytest.mark.parametrize(
    ("values", "names", "reason"),
    [
        ({"question": "Why?"}, {}, "neither a prompt nor messages; the columns are question"),
        ({"prompt": None}, {}, "neither a prompt"),
        ({"prompt": "a"}, {"question": "prompt"}, "no column question"),
        ({"prompt": [USER, {"role": "user", "content": " "}]}, {}, "the last message is empty"),
        ({"prompt": "a", "deep": json.loads("[" * 250 + "]" * 250)}, {}, "scoring could not read it: recursion limit"),
        ({"prompt": "a", "question": "b"}, {"question": "prompt"}, "already has a column prompt"),
        ({"prompt": "  "}, {}, "empty"),
        ({"prompt": []}, {}, "a text or a list of messages"),
        ({"prompt": 3}, {}, "not 3"),
        ({"prompt": ["Why?"]}, {}, "must have role and content"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, {}, "'robot' is not one of"),
        ({"prompt": [{"role": "user", "content": 3}]}, {}, "must be a text"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "no text"),
        ({"prompt": [USER, {"role": "assistant", "content": "So."}]}, {}, "the policy is to write that one"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [1]}, USER]}, {}, "tool calls"),
        ({"prompt": "a", "system": 3}, {}, "column system"),
        ({"prompt": [{"role": "system", "content": "x"}, USER], "system": "y"}, {}, "another system message"),
        ({"prompt": "half a pair: \ud800"}, {}, "cannot be written"),
        ({"prompt": "a", "x": float("inf")}, {}, "cannot be written"),
        ({"prompt": "a" * MOST_BYTES}, {}, "bytes with its columns"),
    ],
)
def test_unusable_rows_have_a_reason(values: dict[str, Any], names: dict[str, str], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        prompt_of(values, 1, names)


def test_a_row_is_not_changed() -> None:
    row = {"prompt": "a", "system": "b", "answer": [1]}
    before = json.dumps(row)
    prompt_of(row, 1, {"answer": "target"})
    assert json.dumps(row) == before
