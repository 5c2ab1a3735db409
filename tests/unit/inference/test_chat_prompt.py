"""Chat messages in the form that a template reads."""

import json
from typing import Any

import pytest

from tentalis.inference.chat_prompt import ChatPrompt, InvalidMessages

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Rain "}, {"type": "text", "text": "in Oslo?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
]
READS_ALL = "{% if tools %}{% for call in message.tool_calls %}"
READS_NOTHING = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_a_template_that_reads_tools_gets_them_with_arguments_as_objects() -> None:
    messages, tools = ChatPrompt(READS_ALL).prepared(MESSAGES, TOOLS)
    assert tools == TOOLS
    assert messages[1]["content"] == "Rain in Oslo?"
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert messages[3:] == MESSAGES[3:] and MESSAGES[2]["tool_calls"] == [CALL, CALL]


def test_a_template_that_reads_no_tools_gets_text() -> None:
    messages, tools = ChatPrompt(READS_NOTHING).prepared(MESSAGES, TOOLS)
    assert tools is None and [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be short.\n\n# Tools") and json.dumps(TOOLS[0]) in messages[0]["content"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert messages[2] == {"role": "assistant", "content": f"{call}\n{call}"}
    result = "<tool_response>\nrain\n</tool_response>"
    assert messages[3] == {"role": "user", "content": f"{result}\n{result}"}


def test_a_template_without_tools_gets_a_system_message_only_if_there_are_tools() -> None:
    asked = [{"role": "user", "content": "hi"}]
    assert ChatPrompt(READS_NOTHING).prepared(asked, None) == (asked, None)
    assert ChatPrompt(READS_NOTHING).prepared(asked, [])[0] == asked
    messages, _ = ChatPrompt({"default": READS_NOTHING}).prepared(asked, TOOLS)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("# Tools")


def test_arguments_that_are_not_an_object_stay_as_they_are() -> None:
    for arguments in ("not JSON", "[1]"):
        sent = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}
        [message], _ = ChatPrompt(READS_ALL).prepared([sent], None)
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("template", [READS_ALL, READS_NOTHING])
@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, "needs a role"),
        ({"role": "user", "content": [1]}, "must be an object"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": 1}, "tool_calls"),
    ],
)
def test_messages_that_no_template_can_render(template: str, message: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidMessages, match=problem):
        ChatPrompt(template).prepared([message], None)
