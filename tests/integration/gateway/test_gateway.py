"""The gateway over HTTP, before a scripted backend: the contract that clients and the log rely on."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from schemas.records import LogprobsMode, SessionEventKind, Status
from schemas.tensors import float32_view, int32_view
from tentalis.gateway.app import not_ready_reason
from tentalis.gateway.http import keys
from tests.support.gateway_lab import PROMPT_IDS, Script, ack, backend_app, chunks, lab, listening, wait_for
from tests.support.http_server import serving


def test_a_whole_answer_is_passed_on_and_recorded(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(3)
        response = gateway.chat("Hello", headers={"X-Session-Id": "s1", "X-Turn-Type": "main"})
        assert response.status_code == 200
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == "Good day, friend!"
        assert "token_ids" not in answer["choices"][0] and "prompt_token_ids" not in answer
        assert answer["choices"][0]["logprobs"] is None
        [event] = gateway.log.events
    assert event.session_event_id == response.headers["x-request-id"]
    assert event.session_id == "s1" == response.headers["x-session-id"]
    assert (event.turn_type, event.decided_by, event.status) == ("main", "header", Status.OK)
    assert (event.policy, event.model, event.gateway_id) == ("assistant", "assistant@v3", "gw-1")
    assert [m.model_dump() for m in event.messages] == [{"role": "user", "content": "Hello"}]
    assert (event.response, event.finish_reason, event.not_trainable) == ("Good day, friend!", "stop", "")
    assert int32_view(event.prompt_token_ids).tolist() == PROMPT_IDS
    assert int32_view(event.response_token_ids).tolist() == [100, 101, 102, 103]
    np.testing.assert_allclose(float32_view(event.sampler_logprobs), -0.5)
    assert event.logprobs_mode is LogprobsMode.PROCESSED
    assert (event.sampling.temperature, event.sampling.top_p, event.sampling.top_k) == (1.0, 1.0, 0)


def test_session_and_turn_type_come_from_the_header_then_the_body_then_a_guess(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.chat("a", headers={"X-Session-Id": "h", "X-Turn-Type": "side"}, session_id="b", turn_type="main")
        gateway.chat("a", session_id="b", turn_type="side", session_done=True)
        gateway.chat("a", headers={"X-Session-Done": "no"}, session_id="b", session_done=True)
        gateway.chat("a")
        said = [(e.session_id, e.turn_type, e.decided_by, e.done) for e in gateway.log.events]
        assert said[:2] == [("h", "side", "header", False), ("b", "side", "body", True)]
        assert said[2] == ("b", "main", "heuristic", False)
        assert said[3][0].startswith("auto-") and said[3][1:] == ("main", "heuristic", False)
        # What is ours never reaches the backend.
        assert not any({"session_id", "turn_type", "session_done"} & set(body) for body in gateway.script.bodies)
        for bad in ({"X-Turn-Type": "maybe"}, {"X-Session-Id": "a b"}, {"X-Session-Done": "perhaps"}):
            assert gateway.chat("a", headers=bad).status_code == 400
        assert gateway.chat("a", session_id="x\r\nX-Evil: 1").status_code == 400
    with lab(tmp_path / "default", turn_type="side") as gateway:
        gateway.chat("a", headers={"X-Session-Id": "s"})
        assert [(e.turn_type, e.decided_by) for e in gateway.log.events] == [("side", "default")]


def test_a_stream_passes_through_as_it_comes_and_is_recorded(tmp_path: Path) -> None:
    gate = threading.Event()
    with lab(tmp_path, Script(gate=gate)) as gateway:
        gateway.serve(1)
        with gateway.streaming("Hello", headers={"X-Session-Id": "s"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            seen = chunks(response)
            first, second = next(seen), next(seen)
            # The first word is here while the backend has not said the second, and nothing is recorded yet.
            assert first and second and second["choices"][0]["delta"] == {"content": "Good"}
            assert gateway.log.taken == []
            gate.set()
            rest = list(seen)
        assert rest[-1] is None
        every = [first, second, *(chunk for chunk in rest if chunk is not None)]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in every) == "Good day, friend!"
        assert every[-1]["choices"][0]["finish_reason"] == "stop"
        assert all("token_ids" not in c["choices"][0] and "prompt_token_ids" not in c for c in every)
        assert all(c["choices"][0]["logprobs"] is None for c in every)
        [event] = gateway.log.events
        assert (event.response, event.not_trainable) == ("Good day, friend!", "")
        assert int32_view(event.response_token_ids).tolist() == [100, 101, 102, 103]
        # Who asks for log-probs, token ids and usage gets them.
        asked = gateway.stream("Hello", logprobs=True, return_token_ids=True, stream_options={"include_usage": True})
        assert asked[1] is not None and asked[1]["choices"][0]["token_ids"] == [100]
        assert asked[1]["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
        assert asked[-2] is not None and asked[-2]["usage"]["completion_tokens"] == 4


def test_the_end_of_an_answer_is_sent_only_after_its_turn_is_recorded(tmp_path: Path) -> None:
    with lab(tmp_path, ack_s=20.0) as gateway:
        gateway.log.away = True
        with gateway.streaming("Hello") as response:
            seen = chunks(response)
            heard = [next(seen) for _ in range(4)]
            assert all(c and c["choices"][0]["finish_reason"] is None for c in heard)
            wait_for(lambda: gateway.log._waiting)
            gateway.log.back()
            end = list(seen)
        assert end[0] and end[0]["choices"][0]["finish_reason"] == "stop" and end[-1] is None
        assert len(gateway.log.events) == 1


def test_tool_calls_null_and_list_content_and_errors_of_every_kind(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    script = Script(tool_calls=[call], finish_reason="tool_calls")
    picture = "data:image/png;base64," + "A" * 100_000
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with lab(tmp_path, script) as gateway:
        whole = gateway.chat("x", messages=messages, tools=tools, tool_choice="auto")
        assert whole.json()["choices"][0]["message"]["tool_calls"] == [call]
        gateway.stream("x", messages=messages, tools=tools)
        for body in gateway.script.bodies:
            assert body["messages"] == messages and body["tools"] == tools  # images too: unchanged
        for event in gateway.log.events:
            assert [(m.role, m.content) for m in event.messages] == [
                ("system", "Be brief."),
                ("user", "What is\nthis?"),
                ("assistant", ""),
                ("tool", "blue"),
                ("user", "[image]"),
            ]
            assert [(c.name, c.arguments) for c in event.tool_calls] == [("look", '{"at": "sky"}')]
            kept = json.loads(event.request)
            assert kept["tools"] == tools and kept["messages"]["2"]["tool_calls"] == [call]
            assert len(event.request) < 5000 and "left-out" in event.request
        gateway.log.taken.clear()
        for status, content, kind in (
            (400, b'{"error": {"message": "no"}}', "application/json"),
            (429, b'{"error": {"message": "slow down"}}', "application/json"),
            (500, b"<html>broken</html>", "text/html"),
            (503, b"", "text/plain"),
        ):
            script.error = (status, content, kind)
            for stream in (False, True):
                refused = gateway.chat("x", stream=stream)
                assert (refused.status_code, refused.content) == (status, content)
                assert refused.headers["content-type"].startswith(kind) and refused.headers["retry-after"] == "7"
        script.error = (200, b"<html>fine</html>", "text/html")
        assert gateway.chat("x").status_code == 502
        assert gateway.chat("x", stream=True).status_code == 502
        script.error = (200, b'{"error": "out of order"}', "application/json")
        assert gateway.chat("x").status_code == 502
        script.error = (307, b"", "text/html")
        assert gateway.chat("x").status_code == 502
        # Only what the backend failed at is on the log, and as that.
        wait_for(lambda: len(gateway.log.events) >= 5)
        assert {event.status for event in gateway.log.events} == {Status.FAILED}


def test_authorization_is_checked_and_the_backends_key_never_leaks(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice = keys.create(path, [keys.Scope.CHAT], user="alice")
    service = keys.create(path, [keys.Scope.CHAT])
    reader = keys.create(path, [keys.Scope.EVENTS])
    assert alice not in path.read_text() and path.stat().st_mode & 0o077 == 0
    with lab(tmp_path, keys=path, secret="sk-of-the-backend") as gateway:

        def ask(key: str | None, **headers: str) -> httpx.Response:
            given = {"Authorization": f"Bearer {key}"} if key else {}
            return gateway.chat("hi", headers=given | headers)

        assert ask(None).status_code == 401 and ask("tk-wrong").status_code == 401
        assert ask(reader).status_code == 403
        assert gateway.http.get("/v1/models").status_code == 401
        assert gateway.script.bodies == []  # none of them reached the backend
        assert ask(alice, **{"X-Session-Id": "s"}).status_code == 200
        assert ask(alice, **{"X-User-Id": "bob"}).status_code == 403
        assert gateway.chat("hi", headers={"x-api-key": alice, "X-Session-Id": "s"}).status_code == 200
        assert ask(service, **{"X-User-Id": "bob", "X-Session-Id": "s"}).status_code == 200
        assert ask(service, **{"X-Session-Id": "s"}).status_code == 200
        assert {head["authorization"] for head in gateway.script.heads} == {"Bearer sk-of-the-backend"}
        events = gateway.log.events
        assert [e.user_id for e in events] == ["alice", "alice", "bob", None]
        # One name of a session, three owners: three sessions.
        assert len({e.session_id for e in events}) == 3 and events[0].session_id == events[1].session_id
        gateway.script.error = (401, b'{"error": {"message": "bad key sk-of-the-backend"}}', "application/json")
        leaked = ask(alice)
        assert leaked.status_code == 401 and b"sk-of-the-backend" not in leaked.content
        gateway.script.error = None
        assert keys.revoke(path, alice.split("-")[1])
        wait_for(lambda: ask(alice).status_code == 401, "a revoked key goes on working")


def test_side_turns_are_passed_on_and_are_no_training_data(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        said = gateway.chat("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")
        assert said.json()["choices"][0]["message"]["content"] == "Good day, friend!"
        assert "x-tentalis-task-id" not in said.headers  # nothing will come of it that feedback could speak of
        gateway.chat("hello", headers={"X-Turn-Type": "side"})
        assert "x-tentalis-task-id" in gateway.chat("hello").headers
        assert [e.turn_type for e in gateway.log.events] == ["side", "side", "main"]
        counted = {"kind": "side", "decided_by": "heuristic", "session_by": "heuristic", "sign": "heartbeat"}
        assert gateway.metric("tentalis_gateway_turns_total", **counted) == 1


def test_calls_in_flight_finish_on_their_version_and_new_ones_take_the_new(tmp_path: Path) -> None:
    gate = threading.Event()
    with lab(tmp_path, Script(gate=gate)) as gateway, ThreadPoolExecutor() as pool:
        gateway.serve(1)
        began = pool.submit(gateway.stream, "one")
        wait_for(lambda: gateway.script.bodies)
        gateway.serve(2)
        gate.set()
        gateway.stream("two")
        began.result(20)
        assert sorted(e.model for e in gateway.log.events) == ["assistant@v1", "assistant@v2"]
        # The old one is unloaded before its successor's acknowledgement is read: the call waits, and is not refused.
        gateway.script.adapters = {"assistant@v3"}
        waiting = pool.submit(gateway.chat, "three")
        wait_for(lambda: gateway.metric("tentalis_gateway_holds_total") >= 1)
        gateway.serve(3)
        assert waiting.result(20).status_code == 200
        assert gateway.log.events[-1].model == "assistant@v3"


def test_a_backend_that_cannot_swap_beside_is_waited_for_and_then_it_is_503(tmp_path: Path) -> None:
    backend = {"name": "local", "server_id": "local", "swap": "hold"}
    script = Script(error=(503, b"busy", "text/plain"))
    with listening(backend_app(script)) as url:
        more = {"backends": [backend | {"url": url, "models": ["base"]}], "hold_s": 1.0}
        with lab(tmp_path, script, **more) as gateway, ThreadPoolExecutor() as pool:
            refused = gateway.chat("x")
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            waiting = pool.submit(gateway.chat, "x")
            seen = gateway.metric("tentalis_gateway_holds_total")
            wait_for(lambda: gateway.metric("tentalis_gateway_holds_total") > seen)
            script.error = None
            assert waiting.result(20).status_code == 200


def test_a_version_that_its_backend_has_no_more_is_named(tmp_path: Path) -> None:
    with lab(tmp_path, hold_s=0.3) as gateway:
        gateway.serve(1)
        gateway.script.adapters.clear()
        refused = gateway.chat("x")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "assistant@v1" in refused.json()["error"]["message"]


def test_a_gateway_that_has_just_started_waits_until_it_knows_what_is_served(tmp_path: Path) -> None:
    with lab(tmp_path, hold_s=20.0) as gateway, ThreadPoolExecutor() as pool:
        gateway.deps.served.caught_up = False
        waiting = pool.submit(gateway.chat, "one")
        wait_for(lambda: gateway.metric("tentalis_gateway_turns_total") >= 1)
        assert not gateway.script.bodies
        gateway.serve(1)
        gateway.deps.served.caught_up = True
        assert waiting.result(20).status_code == 200
        assert [event.model for event in gateway.log.events] == ["assistant@v1"]
    with lab(tmp_path, hold_s=0.2) as gateway:
        gateway.deps.served.caught_up = False
        refused = gateway.chat("one")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert not gateway.script.bodies and not gateway.log.events


def test_a_gateway_that_waits_for_versions_is_ready_once_one_is_served(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        settings = gateway.deps.settings.model_copy(update={"wait_for_versions": True})
        waiting = replace(gateway.deps, settings=settings)
        gateway.deps.served.apply(ack("another", 1))
        assert not_ready_reason(waiting) == "waiting for the first served version of the policy assistant"
        gateway.serve(1)
        assert not_ready_reason(waiting) is None


def test_each_request_is_one_event_whatever_history_it_resends(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.chat("one")
        gateway.chat("one", "Good day, friend!", "two")
        gateway.chat("one", "Good day, friend!", "two", "Good day, friend!", "three")
        events = gateway.log.events
        assert len(events) == 3 and len({e.session_event_id for e in events}) == 3
        assert len({e.session_id for e in events}) == 1  # found by how the conversation begins
        assert [len(e.messages) for e in events] == [1, 3, 5]
        gateway.http.post(f"/v1/sessions/{events[0].session_id}/end").raise_for_status()
        assert gateway.log.events[-1].kind is SessionEventKind.END
        assert gateway.log.events[-1].session_id == events[0].session_id


def test_who_opts_out_is_answered_and_not_recorded(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        for stream in (False, True):
            assert gateway.chat("secret", headers={"X-Tentalis-Record": "off"}, stream=stream).status_code == 200
        gateway.script.error = (500, b"", "text/plain")
        gateway.chat("secret", headers={"X-Tentalis-Record": "off"})
        assert gateway.log.taken == [] and not list((tmp_path / "spool").glob("*.record"))
        assert all("return_token_ids" not in body for body in gateway.script.bodies)
        assert gateway.chat("x", headers={"X-Tentalis-Record": "of"}).status_code == 400


def test_a_retry_is_recorded_with_the_answer_that_its_client_was_shown(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        shown = {}
        for words in (("first",), ("second",)):
            gateway.script.words = words
            answer = gateway.chat("x", headers={"Idempotency-Key": "k", "X-Session-Id": "s"})
            shown[answer.headers["x-request-id"]] = answer.json()["choices"][0]["message"]["content"]
        assert list(shown.values()) == ["first", "second"]
        assert {event.session_event_id: event.response for event in gateway.log.events} == shown


def test_a_session_ends_by_call_for_who_has_it_alone_and_not_where_nothing_may_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    service, ann = (keys.create(path, [keys.Scope.CHAT], user=user) for user in (None, "ann"))
    with lab(tmp_path, keys=path) as gateway:

        def end(key: str, name: str = "s", **headers: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} | {k.replace("_", "-"): v for k, v in headers.items()}
            return gateway.http.post(f"/v1/sessions/{name}/end", headers=headers)

        assert end(ann, X_Tentalis_Record="off").json() == {"status": "not_recorded", "session_id": "s"}
        assert end(ann, X_Tentalis_Record="of").status_code == 400
        assert end(ann, X_User_Id="bob").status_code == 403
        assert end(ann, "").status_code == 400
        assert gateway.log.taken == []
        for answer in (end(ann), end(service, X_User_Id="bob"), end(service, "ann/s", X_User_Id="bob"), end(service)):
            assert answer.json()["status"] == "ended"
        named = [event.session_id for event in gateway.log.events]
        assert named == ["ann/s", "bob/s", "bob/ann/s", f"*{service.split('-')[1]}/s"]


def test_a_user_is_who_the_first_header_names_in_utf8_or_latin1(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:

        def ask(*headers: tuple[str, bytes]) -> None:
            body = {"model": "assistant", "messages": [{"role": "user", "content": "x"}]}
            sent = [(name.encode(), value) for name, value in headers]
            gateway.http.post("/v1/chat/completions", json=body, headers=sent).raise_for_status()

        ask(("X-User-Id", "änn".encode()))
        ask(("X-User-Id", "änn".encode("latin-1")))
        ask(("X-User-Id", b"ann"), ("X-User-Id", b"bob"))
        ask(("X-Tentalis-Record", b"off"), ("X-Tentalis-Record", b"on"))
        assert [event.user_id for event in gateway.log.events] == ["änn", "änn", "ann"]


def test_an_unknown_path_is_answered_with_the_right_base_url(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        for method, path, status in (
            ("POST", "/chat/completions", 404),
            ("POST", "/v1/v1/messages", 404),
            ("GET", "/v1/messages", 405),
        ):
            refused = gateway.http.request(method, path)
            assert refused.status_code == status
            message = refused.json()["error"]["message"]
            assert path in message and "ends in /v1" in message


def test_a_client_that_hangs_up_cancels_the_generation(tmp_path: Path) -> None:
    gate = threading.Event()
    with lab(tmp_path, Script(gate=gate)) as gateway:
        with gateway.streaming("x") as response:
            next(chunks(response))
        assert gateway.script.cancelled.wait(20)
        gateway.script.cancelled.clear()
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": [{"role": "user", "content": "x"}]}
            httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=0.5)
        assert gateway.script.cancelled.wait(20)
        assert gateway.log.taken == []


def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(tmp_path: Path) -> None:
    with lab(tmp_path, Script(break_after=2)) as gateway:
        seen = gateway.stream("x")
        assert None not in seen and seen[-1] and "error" in seen[-1]
        wait_for(lambda: gateway.log.events)
        [event] = gateway.log.events
        assert (event.status, event.response) == (Status.FAILED, "Good day")


def test_an_error_in_a_good_answer_is_told_in_the_backends_words(tmp_path: Path) -> None:
    error = b'{"error": {"message": "out of memory with sk-1", "code": 500}}'
    begun, ended = (
        b'data: {"choices": [{"index": 0, "delta": {"content": "Good"}, "finish_reason": %b}]}\n\n' % reason
        for reason in (b"null", b'"stop"')
    )
    kind, said = "application/json", error

    def backend(method: str, path: str, headers: object, body: bytes) -> tuple[int, str, bytes]:
        return (200, kind, said) if method == "POST" else (200, "application/json", b'{"data": [{"id": "base"}]}')

    with serving(backend) as url, lab(tmp_path, backend_url=url, secret="sk-1") as gateway:
        for stream in (False, True):
            refused = gateway.chat("x", stream=stream)
            assert refused.status_code == 502
            assert refused.json()["error"]["message"].endswith(": out of memory with [key]")
        kind, said = "text/event-stream", begun + b"data: " + error + b"\n\n"
        last = gateway.stream("x")[-1]
        assert last and last["error"]["message"] == "out of memory with [key]"
        said = begun + b'data: {"choices": [], "error": null}\n\n' + ended + b"data: [DONE]\n\n"
        assert gateway.stream("x")[-1] is None


def test_plain_completions_are_passed_on_and_recorded_as_side_turns(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        body = {"model": "assistant", "prompt": "Once"}
        answer = gateway.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "Good day, friend!"
        assert answer["choices"][0]["logprobs"] is None and "token_ids" not in answer["choices"][0]
        [event] = gateway.log.events
        assert (event.turn_type, event.messages[0].content, event.response) == ("side", "Once", "Good day, friend!")
        assert len(event.response_token_ids) == 16


def test_a_stream_of_several_prompts_passes_as_it_comes(tmp_path: Path) -> None:
    gate = threading.Event()
    with lab(tmp_path, Script(gate=gate)) as gateway:
        body = {"model": "base", "prompt": ["Once", "Twice"], "stream": True}
        with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            seen = chunks(response)
            early = [next(seen) for _ in range(5)]  # the first has ended, the second not
            told = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in early if c]
            assert told == [(0, None)] * 3 + [(0, "length"), (1, None)] and gateway.log.taken == []
            gate.set()
            rest = [c and c["choices"][0]["finish_reason"] for c in seen]
        assert rest == [None, None, "length", None]  # the last is [DONE]
        assert len(gateway.log.events) == 1


def test_a_backend_that_gives_fewer_answers_than_are_asked_for_is_recorded_as_it_came(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:  # whose streams have one choice, whatever n is
        gateway.serve(1)
        seen = gateway.stream("x", n=2)
        assert seen[-1] is None and "".join(text_of(chunk) for chunk in seen) == "Good day, friend!"
        [event] = gateway.log.events
        assert (event.response, event.finish_reason, event.status.value) == ("Good day, friend!", "stop", "ok")
        assert "2 answers" in event.not_trainable
        gateway.script.break_after = 2
        assert "error" in (gateway.stream("x", n=2)[-1] or {})


def text_of(chunk: dict[str, Any] | None) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in (chunk or {}).get("choices", ()))


def test_models_are_the_policies_and_the_base_models(tmp_path: Path) -> None:
    policy = {"name": "assistant", "backend": "local", "models": ["gpt-*"]}
    with lab(tmp_path, policies=[policy]) as gateway:
        gateway.serve(2)
        cards = {card["id"]: card for card in gateway.http.get("/v1/models").json()["data"]}
        assert set(cards) == {"assistant", "base"} and cards["assistant"]["root"] == "assistant@v2"
        for model, name in (("gpt-4o", "assistant@v2"), ("assistant@v2", "assistant@v2"), ("base", "base")):
            assert gateway.chat("x", model=model).json()["model"] == name
        unknown = gateway.chat("x", model="llama")
        assert unknown.status_code == 404 and "assistant, base" in unknown.json()["error"]["message"]
