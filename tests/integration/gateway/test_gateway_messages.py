"""Anthropic's messages over HTTP."""

import json
from pathlib import Path
from typing import Any

from schemas.records import Status
from tests.support.gateway_lab import Lab, Script, lab, wait_for
from tests.support.http_server import serving

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def _ask(gateway: Lab, **more: Any) -> Any:
    body = {"model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]} | more
    return gateway.http.post("/v1/messages", json=body)


def _events(text: str) -> list[dict[str, Any]]:
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_messages_are_answered_and_recorded(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        answer = _ask(gateway, system="Be kind.").json()
        assert answer["content"] == [{"type": "text", "text": "Good day, friend!"}]
        assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
        assert answer["usage"] == {"input_tokens": 3, "output_tokens": 4} and answer["model"] == "assistant@v1"
        events = _events(_ask(gateway, stream=True).text)
        assert [e["type"] for e in events] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 4,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert "".join(e["delta"]["text"] for e in events[2:6]) == "Good day, friend!"
        assert events[-2]["delta"]["stop_reason"] == "end_turn" and events[-2]["usage"]["output_tokens"] == 4
        first, second = gateway.log.events
        assert [m.role for m in first.messages] == ["system", "user"] and first.not_trainable == ""
        assert second.response == "Good day, friend!" and second.not_trainable == ""


def test_tool_calls_become_blocks(tmp_path: Path) -> None:
    with lab(tmp_path, Script(tool_calls=[CALL], finish_reason="tool_calls", words=("I look. ", ""))) as gateway:
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        answer = _ask(gateway, tools=tools).json()
        assert answer["content"][-1] == {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "sky"}}
        assert answer["stop_reason"] == "tool_use"
        events = _events(_ask(gateway, tools=tools, stream=True).text)
        starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert starts == ["text", "tool_use"]
        [delta] = [e["delta"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert json.loads(delta["partial_json"]) == {"at": "sky"}
        assert all(event.tool_calls[0].name == "look" for event in gateway.log.events)


def test_a_forced_tool_ends_with_the_use_of_a_tool(tmp_path: Path) -> None:
    script = Script(tool_calls=[CALL], finish_reason="stop", words=("", ""))
    with lab(tmp_path, script) as gateway:
        forced = {
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "look"},
        }
        assert _ask(gateway, **forced).json()["stop_reason"] == "tool_use"
        events = _events(_ask(gateway, stream=True, **forced).text)
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        named = {"type": "function", "function": {"name": "look"}}
        assert [body["tool_choice"] for body in gateway.script.bodies] == [named, named]
        gateway.script.tool_calls = []
        assert _ask(gateway).json()["stop_reason"] == "end_turn"


def test_a_stream_whose_tokens_are_no_numbers_ends_with_an_error_and_is_no_good_turn(tmp_path: Path) -> None:
    said = (
        b'data: {"choices": [{"index": 0, "delta": {"content": "Good"}, "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": "x"}}\n\ndata: [DONE]\n\n'
    )

    def backend(method: str, path: str, headers: object, body: bytes) -> tuple[int, str, bytes]:
        if method == "POST":
            return 200, "text/event-stream", said
        return 200, "application/json", b'{"data": [{"id": "base"}]}'

    with serving(backend) as url, lab(tmp_path, backend_url=url) as gateway:
        assert _ask(gateway, stream=True).json()["error"]["type"] == "api_error"
        wait_for(lambda: gateway.log.events)
        assert [event.status for event in gateway.log.events] == [Status.FAILED]


def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    with lab(tmp_path, Script(error=(429, b'{"error": {"message": "slow down"}}', "application/json"))) as gateway:
        refused = _ask(gateway)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
        assert refused.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
        assert _ask(gateway, max_tokens=None).json()["error"]["type"] == "invalid_request_error"
        gateway.script.error = (500, b"<html>", "text/html")
        assert _ask(gateway, stream=True).json()["error"] == {"type": "api_error", "message": "<html>"}
