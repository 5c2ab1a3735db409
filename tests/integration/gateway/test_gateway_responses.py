"""OpenAI's responses API over HTTP, with OpenAI's own client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas.records import Status
from tests.support.gateway_lab import Lab, Script, lab, wait_for

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


def _client(gateway: Lab) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.http.base_url}/v1", api_key="none", max_retries=0)


def test_a_conversation_is_answered_and_recorded(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        client = _client(gateway)
        first = client.responses.create(model="assistant", input="Hello", instructions="Be kind.")
        assert (first.output_text, first.status, first.model) == ("Good day, friend!", "completed", "assistant@v1")
        assert first.usage is not None and (first.usage.input_tokens, first.usage.output_tokens) == (3, 4)
        said: Any = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "Shorter"}]
        with client.responses.stream(model="assistant", input=said, instructions="Be kind.") as stream:
            words = [event.delta for event in stream if event.type == "response.output_text.delta"]
            second = stream.get_final_response()
        assert len(words) == 4 and "".join(words) == second.output_text == "Good day, friend!"
        one, two = gateway.log.events
        assert first.id == f"resp_{one.session_event_id}" and second.id == f"resp_{two.session_event_id}"
        assert one.session_id == two.session_id and (one.not_trainable, two.not_trainable) == ("", "")
        assert [(m.role, m.content) for m in two.messages] == [
            ("system", "Be kind."),
            ("user", "Hello"),
            ("assistant", one.response),
            ("user", "Shorter"),
        ]
        with pytest.raises(openai.BadRequestError, match="whole conversation"):
            client.responses.create(model="assistant", input="Hello", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_tools_are_called(tmp_path: Path) -> None:
    with lab(tmp_path, Script(tool_calls=[CALL], finish_reason="tool_calls", words=("I look. ", ""))) as gateway:
        client = _client(gateway)
        whole = client.responses.create(model="assistant", input="Look", tools=[LOOK])
        with client.responses.stream(model="assistant", input="Look", tools=[LOOK]) as stream:
            streamed = stream.get_final_response()
        assert [item.type for item in whole.output] == ["function_call"]
        assert [item.type for item in streamed.output] == ["message", "function_call"]
        for response in (whole, streamed):
            called = response.output[-1]
            assert called.type == "function_call"
            assert (called.call_id, called.name, json.loads(called.arguments)) == ("c1", "look", {"at": "sky"})
        answer: Any = {"type": "function_call_output", "call_id": "c1", "output": "blue"}
        said: Any = [{"role": "user", "content": "Look"}, *streamed.output, answer]
        client.responses.create(model="assistant", input=said, tools=[LOOK])
        sent = gateway.script.bodies[-1]["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
        assert (sent[1]["content"], sent[1]["tool_calls"]) == ("I look. ", [CALL])
        assert all(event.tool_calls[0].name == "look" for event in gateway.log.events)


def test_errors_are_exceptions_of_the_client(tmp_path: Path) -> None:
    with lab(tmp_path, Script(error=(429, b'{"error": {"message": "slow down"}}', "application/json"))) as gateway:
        client = _client(gateway)
        with pytest.raises(openai.RateLimitError, match="slow down"):
            client.responses.create(model="assistant", input="Hello")
        gateway.script.error, gateway.script.break_after = None, 2
        gateway.log.events.clear()
        with pytest.raises(openai.APIError), client.responses.stream(model="assistant", input="Hello") as stream:
            stream.until_done()
        wait_for(lambda: gateway.log.events)
        assert [event.status for event in gateway.log.events] == [Status.FAILED]
