"""OpenAI's responses API over chat completions: what is asked, and how an answer is given whole and as a stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.sse import EventParser
from tentalis.gateway.protocols.responses import ResponsesProtocol
from tentalis.gateway.protocols.responses_answer import ResponsesStream

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SHAPE = ResponsesProtocol()
LOOK = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def said(sent: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked with the types of OpenAI's client."""
    parser = EventParser()
    events = [json.loads(event) for event in [*parser.feed(sent), *parser.close()]]
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"model": "assistant@v1", "created": 5, "choices": [choice]} | more


def test_items_become_chat_messages() -> None:
    body = SHAPE.body(
        {
            "model": "assistant",
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "stream": True,
            "store": False,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "tools": [LOOK],
            "tool_choice": {"type": "function", "name": "look"},
            "parallel_tool_calls": False,
            "input": [
                {"role": "developer", "content": "No jokes."},
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "x"}],
                },
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
                {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sky"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sea"}]},
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
            ],
        }
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    assert body == {
        "model": "assistant",
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {name: LOOK[name] for name in LOOK if name != "type"}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "No jokes."},
            {"role": "user", "content": "hi\nx"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sky"},
            {"role": "tool", "tool_call_id": "c2", "content": "sea"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
        ],
    }


def test_a_text_and_its_form() -> None:
    assert SHAPE.body({"input": "hi", "tool_choice": "auto", "tools": []}) == {
        "messages": [{"role": "user", "content": "hi"}]
    }
    schema = {"name": "place", "schema": {"type": "object"}, "strict": True}
    body = SHAPE.body({"input": "hi", "text": {"verbosity": "low", "format": {"type": "json_schema"} | schema}})
    assert (body["verbosity"], body["response_format"]) == ("low", {"type": "json_schema", "json_schema": schema})
    assert SHAPE.body({"input": "hi", "text": {"format": {"type": "text"}}}).keys() == {"messages"}
    [message] = SHAPE.body({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": ""}]})[
        "messages"
    ]
    assert message["role"] == "assistant" and message["content"] is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"conversation": "conv_1"}, "whole conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": None}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": [1]}, "input must be"),
        ({"input": [{"role": ["user"], "content": "x"}]}, r"input\[0\].role"),
        ({"input": [{"role": "user", "content": 1}]}, r"input\[0\].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "image_url"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "keeps no such thing"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": {}}]}, "arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            "image_url",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": "https://x/y.png"}],
                    }
                ]
            },
            "only text",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*'web_search'"),
        ({"tools": {}}, "tools must be a list"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "'xml'"),
        ({"text": "short"}, "text must be an object"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": ["x"]}, "instructions must be a string"),
    ],
)
def test_what_cannot_be_done_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(APIError, match=words) as refused:
        SHAPE.body({"input": "hi"} | wrong)
    assert refused.value.status == 400


def test_a_whole_answer() -> None:
    asked = SHAPE.body({"input": "hi", "tools": [LOOK], "tool_choice": "auto", "max_output_tokens": 9})
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {
        "model": "assistant@v1",
        "created": 5,
        "choices": [{"message": {"content": "I look.", "tool_calls": [call]}, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    given_ = SHAPE.answer(answer, "e1", asked)
    response = Response.model_validate(given_)
    assert (response.id, response.created_at, response.status) == ("resp_e1", 5, "completed")
    assert response.output_text == "I look." and response.max_output_tokens == 9
    text, called = response.output
    assert text.id == "msg_e1" and called.type == "function_call"
    assert (called.call_id, called.name, called.arguments, called.status) == ("c1", "look", "{}", "completed")
    assert given_["tools"] == [LOOK] and given_["tool_choice"] == "auto"
    assert response.usage is not None and response.usage.total_tokens == 5
    assert response.usage.input_tokens_details.cached_tokens == 1
    # What was answered can be sent back, and is then the message that the model gave.
    items = [item.model_dump() for item in response.output]
    [message] = SHAPE.body({"input": items})["messages"]
    assert message == {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    [empty] = SHAPE.answer({"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}, "e2", asked)["output"]
    assert empty["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("reason", "status", "detail"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("abort", "failed", None),
    ],
)
def test_an_answer_that_is_cut_is_not_complete(reason: str, status: str, detail: str | None) -> None:
    whole = SHAPE.answer({"choices": [{"message": {"content": "It"}, "finish_reason": reason}]}, "e1", {})
    stream = ResponsesStream("e1", {})
    last = said(stream.chunk(chunk({"content": "It"})) + stream.chunk(chunk({}, reason)) + stream.end())[-1]
    assert last["type"] == f"response.{status}"
    for response in (whole, last["response"]):
        Response.model_validate(response)
        assert response["status"] == status and (response["error"] is None) == (status != "failed")
        assert (response["incomplete_details"] or {}).get("reason") == detail
        assert response["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")


def test_an_empty_answer_and_a_broken_one() -> None:
    stream = ResponsesStream("e1", {})
    events = said(stream.chunk(chunk({}, "stop")) + stream.end())
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
    stream = ResponsesStream("e1", {})
    *_, error = said(stream.chunk(chunk({"content": "It"})) + stream.error(502, "server_error", "it broke off"))
    assert (error["type"], error["message"], error["error"]["message"]) == ("error", "it broke off", "it broke off")
    call = {"index": 0, "function": {"name": "look", "arguments": {"at": 1}}}
    for wrong in ({"content": ["x"]}, {"tool_calls": [call]}):
        with pytest.raises(TypeError):
            ResponsesStream("e1", {}).chunk(chunk(wrong))


def test_each_item_of_a_stream_ends_before_the_answer_goes_on() -> None:
    """A name that comes late, a text after a call, and a cut: only the last item is a part."""
    stream = ResponsesStream("e1", {})
    call = {"index": 0, "id": "c1"}
    deltas: list[dict[str, Any]] = [
        {"content": "I look."},
        {"tool_calls": [call | {"function": {"arguments": '{"at"'}}]},
        {"tool_calls": [call | {"function": {"name": "look", "arguments": ": 1}"}}]},
        {"content": "So"},
    ]
    events = said(
        b"".join(stream.chunk(chunk(delta)) for delta in deltas) + stream.chunk(chunk({}, "length")) + stream.end()
    )
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert events[9]["delta"] == '{"at": 1}'
    text, called, so = events[-1]["response"]["output"]
    assert [item["id"] for item in (text, called, so)] == ["msg_e1", "fc_e1_1", "msg_e1_2"]
    assert called["arguments"] == '{"at": 1}' and so["content"][0]["text"] == "So"
    assert [item["status"] for item in (text, called, so)] == ["completed", "completed", "incomplete"]


@given(st.lists(texts, max_size=2), st.lists(st.lists(texts, max_size=3), max_size=3), st.data())
def test_the_events_of_a_stream_make_its_response(words: list[str], calls: list[list[str]], data: Any) -> None:
    """`calls`: the pieces of the arguments of each call, which come in any order among each other."""
    deltas: list[dict[str, Any]] = [{"content": word} for word in words]
    queues = [
        [
            {"index": at, "id": f"c{at}", "function": {"name": f"tool{at}", "arguments": ""}},
            *({"index": at, "function": {"arguments": piece}} for piece in pieces),
        ]
        for at, pieces in enumerate(calls)
    ]
    while left := [queue for queue in queues if queue]:
        deltas.append({"tool_calls": [data.draw(st.sampled_from(left)).pop(0)]})
    stream = ResponsesStream("e1", {})
    sent = b"".join(stream.chunk(chunk(delta)) for delta in deltas)
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    sent += stream.chunk(chunk({}, "stop", usage=usage)) + stream.end()
    events = said(sent)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]

    # A client that follows the events has what the last of them holds.
    followed: dict[Any, dict[str, Any]] = {}
    for event in events:
        at = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert at == len(followed)
                followed[at] = {"id": event["item"]["id"], "text": "", "done": None}
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                assert followed[at]["done"] is None and followed[at]["id"] == event["item_id"]
                followed[at]["text"] += event["delta"]
            case "response.output_text.done":
                assert followed[at]["text"] == event["text"]
            case "response.function_call_arguments.done":
                assert followed[at]["text"] == event["arguments"]
            case "response.output_item.done":
                followed[at]["done"] = event["item"]
    response = events[-1]["response"]
    assert [item["done"] for item in followed.values()] == response["output"]
    assert response["usage"]["total_tokens"] == 7
    said_calls = {item["call_id"]: item["arguments"] for item in response["output"] if item["type"] == "function_call"}
    assert said_calls == {f"c{at}": "".join(pieces) for at, pieces in enumerate(calls)}
    assert Response.model_validate(response).output_text == "".join(words)
