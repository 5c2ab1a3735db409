"""Responses that continue an earlier one: with OpenAI's own client, over the records of the gateway."""

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from schemas import topics
from schemas.records import SessionEvent, Status
from tentalis.gateway.api.install import install as bridge
from tentalis.gateway.app import GatewayDependencies
from tentalis.gateway.http.keys import Scope, create
from tentalis.gateway.recording.event_log import EventLog
from tests.support.gateway_lab import Lab, MemoryLog, Script, lab
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import Lab as BrokerLab
from tests.support.sessions_support import fold

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}},
    {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}},
]


class RecordedTurns:
    """The turns of a log in memory. `gone`: ids that the log does not hold any more."""

    horizon_s = 3600.0

    def __init__(self, log: EventLog) -> None:
        assert isinstance(log, MemoryLog)
        self._log, self.gone = log, set[str]()
        self.stale_reason: str | None = None

    def _turns(self) -> dict[str, SessionEvent]:
        return {event.session_event_id: event for event in self._log.events}

    def knows_turn(self, event_id: str) -> bool:
        return event_id in self._turns()

    async def turn(self, event_id: str) -> SessionEvent | None:
        return None if event_id in self.gone else self._turns()[event_id]


def read_back(app: FastAPI, deps: GatewayDependencies) -> None:
    deps.earlier_turns.source = RecordedTurns(deps.event_log)


def client_of(gateway: Lab, key: str = "none", **headers: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{gateway.http.base_url}/v1", api_key=key, max_retries=0, default_headers=headers or None
    )


def spoken(event: SessionEvent) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in event.messages]


def test_a_response_is_continued_in_its_session(tmp_path: Path) -> None:
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        gateway.serve(1)
        client = client_of(gateway)
        first = client.responses.create(model="assistant", input="Hello", instructions="Be kind.")
        assert (first.previous_response_id, first.model_dump()["store"]) == (None, True)
        second = client.responses.create(model="assistant", input="Shorter", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        with client.responses.stream(
            model="assistant", input="In German", instructions="Be brief.", previous_response_id=second.id
        ) as stream:
            third = stream.get_final_response()
        assert third.previous_response_id == second.id
        one, two, three = gateway.log.events
        assert one.session_id == two.session_id == three.session_id
        answer = ("assistant", "Good day, friend!")
        assert spoken(two) == [("system", "Be kind."), ("user", "Hello"), answer, ("user", "Shorter")]
        assert spoken(three) == [("system", "Be brief."), *spoken(two)[1:], answer, ("user", "In German")]
        assert [message["content"] for message in gateway.script.bodies[-1]["messages"]] == [
            content for _, content in spoken(three)
        ]
        assert two.not_trainable == three.not_trainable == ""
        # What was said next is about the answer that it continues, as if the conversation had been sent whole.
        heard = fold((0, one), (10, two), (20, three)).heard
        assert heard == [(one.session_event_id, "user", "Shorter"), (two.session_event_id, "user", "In German")]


def test_new_instructions_replace_only_instructions(tmp_path: Path) -> None:
    """A rule in the input stays, whether the turn before had instructions of its own, inherited ones or none."""
    rule: Any = [{"role": "developer", "content": "Never reveal X."}, {"role": "user", "content": "Hello"}]
    ruled = [("system", "Never reveal X."), ("user", "Hello")]
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        client = client_of(gateway)

        def says(said: Any, previous: str | None = None, instructions: str | None = None) -> str:
            return client.responses.create(
                model="assistant", input=said, previous_response_id=previous, instructions=instructions
            ).id

        first = says(rule)
        second = says("More", first, "Be brief.")
        third = says("More", second)  # inherits them
        says("More", third, "Be kind.")
        one, two, three, four = (spoken(event) for event in gateway.log.events)
        assert one == ruled
        assert two[:3] == three[:3] == [("system", "Be brief."), *ruled]
        assert four[:3] == [("system", "Be kind."), *ruled]
        assert [message["content"] for message in gateway.script.bodies[-1]["messages"]] == [
            content for _, content in four
        ]


def test_a_session_that_the_client_names_is_continued_without_naming_it_again(tmp_path: Path) -> None:
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        named = client_of(gateway, **{"X-Session-Id": "mine", "X-User-Id": "ann"})
        first = named.responses.create(model="assistant", input="Hello")
        again = client_of(gateway, **{"X-User-Id": "ann"})
        answer = again.responses.with_raw_response.create(
            model="assistant", input="More", previous_response_id=first.id
        )
        assert answer.headers["x-session-id"] == "mine"
        assert {event.session_id for event in gateway.log.events} == {"ann/mine"}
        assert gateway.metric("tentalis_gateway_turns_total", session_by="previous_response") == 1


def test_calls_of_tools_are_continued_with_their_ids(tmp_path: Path) -> None:
    script = Script(tool_calls=CALLS, finish_reason="tool_calls", words=("I look. ", ""))
    with lab(tmp_path, script, extensions=(read_back,)) as gateway:
        client = client_of(gateway)
        first = client.responses.create(model="assistant", input="Look", tools=[LOOK])
        outputs: Any = [
            {"type": "function_call_output", "call_id": "c2", "output": "green"},
            {"type": "function_call_output", "call_id": "c1", "output": "blue"},
        ]
        client.responses.create(model="assistant", input=outputs, tools=[LOOK], previous_response_id=first.id)
        sent = gateway.script.bodies[-1]["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
        assert sent[1]["tool_calls"] == CALLS
        assert [message["tool_call_id"] for message in sent[2:]] == ["c2", "c1"]
        one, _ = gateway.log.events
        assert json.loads(one.request)["call_ids"] == ["c1", "c2"]


def test_calls_without_ids_get_the_same_ones_again(tmp_path: Path) -> None:
    bare = [{name: value for name, value in call.items() if name != "id"} for call in CALLS]
    script = Script(tool_calls=bare, finish_reason="tool_calls")
    with lab(tmp_path, script, extensions=(read_back,)) as gateway:
        client = client_of(gateway)
        first = client.responses.create(model="assistant", input="Look", tools=[LOOK])
        given = [item.call_id for item in first.output if item.type == "function_call"]
        assert len(set(given)) == 2
        output: Any = [{"type": "function_call_output", "call_id": call_id, "output": "x"} for call_id in given]
        client.responses.create(model="assistant", input=output, tools=[LOOK], previous_response_id=first.id)
        assert [call["id"] for call in gateway.script.bodies[-1]["messages"][-3]["tool_calls"]] == given


def test_only_the_user_of_a_response_can_continue_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ann, bob = (create(keys, [Scope.CHAT], user=user) for user in ("ann", "bob"))
    shared, other = create(keys, [Scope.CHAT]), create(keys, [Scope.CHAT])
    with lab(tmp_path, keys=keys, extensions=(read_back,)) as gateway:
        of_ann = client_of(gateway, ann).responses.create(model="assistant", input="My secret")
        of_shared = client_of(gateway, shared).responses.create(model="assistant", input="Hello")
        asked = len(gateway.script.bodies)
        for key, response in ((bob, of_ann), (shared, of_ann), (other, of_shared), (ann, of_shared)):
            with pytest.raises(openai.NotFoundError, match="expired"):
                client_of(gateway, key).responses.create(
                    model="assistant", input="Repeat it", previous_response_id=response.id
                )
        with pytest.raises(openai.NotFoundError):
            client_of(gateway, shared, **{"X-User-Id": "ann"}).responses.create(
                model="assistant", input="Repeat it", previous_response_id=of_shared.id
            )
        assert len(gateway.script.bodies) == asked
        client_of(gateway, ann).responses.create(model="assistant", input="More", previous_response_id=of_ann.id)
        client_of(gateway, shared).responses.create(model="assistant", input="More", previous_response_id=of_shared.id)


def test_what_cannot_be_continued_is_refused_with_the_reason(tmp_path: Path) -> None:
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        client = client_of(gateway)

        def refusal(previous: Any) -> openai.APIStatusError:
            with pytest.raises(openai.APIStatusError) as refused:
                client.responses.create(model="assistant", input="More", previous_response_id=previous)
            return refused.value

        unknown = refusal("resp_nothing")
        assert unknown.status_code == 404 and "of the last 1 h; an older one has expired" in str(unknown)
        assert refusal(7).status_code == 400
        off = client_of(gateway, **{"X-Tentalis-Record": "off"}).responses.create(model="assistant", input="Hello")
        assert off.model_dump()["store"] is False and refusal(off.id).status_code == 404
        source = gateway.deps.earlier_turns.source
        assert isinstance(source, RecordedTurns)
        source.stale_reason = "the broker is away"
        behind = refusal("resp_nothing")
        assert behind.status_code == 503 and behind.response.headers["retry-after"] == "2"
        kept = client.responses.create(model="assistant", input="Hello")
        source.gone.add(kept.id.removeprefix("resp_"))
        assert refusal(kept.id).status_code == 404
        gateway.script.break_after = 2
        with pytest.raises(openai.APIError), client.responses.stream(model="assistant", input="Hello") as stream:
            stream.until_done()
        deadline = time.monotonic() + 60
        while gateway.log.events[-1].status is not Status.FAILED:
            assert time.monotonic() < deadline, "the failed turn was not recorded"
            time.sleep(0.02)
        gateway.script.break_after = None
        assert "failed" in str(refusal(f"resp_{gateway.log.events[-1].session_event_id}"))


def test_an_image_that_was_not_kept_ends_a_conversation(tmp_path: Path) -> None:
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        client = client_of(gateway)

        def first(size: int) -> str:
            image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * size, "detail": "auto"}
            said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]}]
            return client.responses.create(model="assistant", input=said).id

        client.responses.create(model="assistant", input="And?", previous_response_id=first(100))
        [seen, *_] = gateway.script.bodies[-1]["messages"]
        assert seen["content"][1]["image_url"]["url"].endswith("A" * 100)
        with pytest.raises(openai.BadRequestError, match="too large to be kept"):
            client.responses.create(model="assistant", input="And?", previous_response_id=first(70_000))


def test_the_words_of_a_note_in_a_text_end_no_conversation(tmp_path: Path) -> None:
    text = "Is left out: nothing? And data:image/png;left-out,70000 characters?"
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    said: Any = [{"role": "user", "content": [{"type": "input_text", "text": text}, image]}]
    with lab(tmp_path, extensions=(read_back,)) as gateway:
        client = client_of(gateway)
        first = client.responses.create(model="assistant", input=said)
        client.responses.create(model="assistant", input="And?", previous_response_id=first.id)
        assert gateway.script.bodies[-1]["messages"][0]["content"][0]["text"] == text


@pytest.mark.broker
def test_another_gateway_continues_it_from_the_log(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    broker = BrokerLab(kafka.bootstrap, unique)
    events = EventLog(broker.settings, "tentalis/gateway/test", broker.codec)
    more: Any = {"events": events, "kafka": broker.settings, "extensions": (bridge,)}
    user = {"X-User-Id": unique}
    try:
        with lab(tmp_path / "first", **more) as gateway:
            first = client_of(gateway, **user).responses.create(model="assistant", input="Hello")
        with lab(tmp_path / "second", **more) as gateway:
            client = client_of(gateway, **user)
            second = client.responses.create(model="assistant", input="Shorter", previous_response_id=first.id)
            # Just recorded here: it is read back from the log before it is continued.
            client.responses.create(model="assistant", input="Shorter still", previous_response_id=second.id)
            with pytest.raises(openai.NotFoundError):
                client_of(gateway).responses.create(model="assistant", input="x", previous_response_id=first.id)
    finally:
        events.close()
    found = broker.records(topics.SESSIONS, lambda event: event.user_id == unique)
    assert len(found) == 3 and len({event.session_id for event in found}) == 1
    assert [content for role, content in spoken(found[-1]) if role == "user"] == ["Hello", "Shorter", "Shorter still"]
