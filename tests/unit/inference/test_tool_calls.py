"""Tool calls in a model's text become those of OpenAI's API, whole and as a stream."""

import json
from typing import Any

import pytest

from tentalis.inference.tool_calls import ToolCallStream, answer_parts

NAMES = {"weather", "python"}


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def untagged(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


HELD = tagged("python", code="print('<tool_call>{}</tool_call>')")
CASES = [
    ("It rains.", "It rains.", []),
    (" a\n", " a\n", []),
    (tagged("weather", city="Oslo"), "", [("weather", {"city": "Oslo"})]),
    (f"Let me see.\n{tagged('weather')}\n", "Let me see.", [("weather", {})]),
    (f"a {tagged('weather')}\n{tagged('python', n=1)} b", "ab", [("weather", {}), ("python", {"n": 1})]),
    (HELD + tagged("weather"), "", [("python", {"code": "print('<tool_call>{}</tool_call>')"}), ("weather", {})]),
    # An unknown name is the client's matter, as with OpenAI.
    (tagged("other"), "", [("other", {})]),
    # A call that cannot be read stays text.
    ("<tool_call>{'name': 'x'}</tool_call>", "<tool_call>{'name': 'x'}</tool_call>", []),
    ('<tool_call>{"name": "x", "argu', '<tool_call>{"name": "x", "argu', []),
    ("x <tool_call>[1]</tool_call> y", "x <tool_call>[1]</tool_call> y", []),
    (f"<tool_call>[1]</tool_call>{tagged('weather')}", "<tool_call>[1]</tool_call>", [("weather", {})]),
    ('<tool_call>{"name": "x", "arguments": {"n": NaN}}</tool_call>', None, []),
    ('<tool_call>{"name": "x", "arguments": {"n": "\\ud800"}}</tool_call>', None, []),
    ("a < b <tool", "a < b <tool", []),
    # Small models leave the tags out.
    (untagged("weather", city="Oslo"), "", [("weather", {"city": "Oslo"})]),
    (f"```json\n{untagged('weather', city='Oslo')}\n```", "", [("weather", {"city": "Oslo"})]),
    (f"```\n{untagged('weather')}\n```", "", [("weather", {})]),
    (untagged("other", city="Oslo"), None, []),
    (untagged("weather") + " is the call.", None, []),
    ('{"name": "weather"}', None, []),
    ("```json\n{}\n```", None, []),
]


def read(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_a_whole_answer(text: str, said: str | None, calls: list[tuple[str, Any]]) -> None:
    found, made = answer_parts(text, NAMES)
    assert (found, read(made)) == (text if said is None else said, calls)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_a_stream_says_the_same_in_pieces(text: str, said: str | None, calls: list[tuple[str, Any]], size: int) -> None:
    stream = ToolCallStream(NAMES)
    parts = [part for at in range(0, len(text), size) for part in stream.push(text[at : at + size])]
    parts += stream.finish()
    assert "".join(part.text for part in parts) == (text if said is None else said)
    assert read([part.call for part in parts if part.call is not None]) == calls


def test_text_and_calls_leave_as_soon_as_they_are_certain() -> None:
    stream = ToolCallStream(NAMES)
    assert [part.text for part in stream.push("It is <b>")] == ["It is <b>"]
    assert stream.push(" <tool_") == []
    [call] = stream.push(f"call>{untagged('weather')}</tool_call>")
    assert call.call is not None
    assert [part.text for part in stream.push("\ndone")] == ["done"]


def test_without_tools_that_it_may_call_json_is_an_answer() -> None:
    assert answer_parts(untagged("weather"), set()) == (untagged("weather"), [])
