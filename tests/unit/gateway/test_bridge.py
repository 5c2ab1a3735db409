"""The bridge's parts: what it remembers, who sees what, which turn is meant, and who watches."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import (
    Feedback,
    HintKind,
    Polarity,
    PolicyAck,
    RecordedBy,
    Result,
    SessionEvent,
    Source,
    Task,
    sample_of,
)
from streams.fold.session_turns import not_trainable, result_of
from tentalis.gateway.api.events import MAX_CLIENTS, MAX_QUEUED_EVENTS, LiveEvents, event_of
from tentalis.gateway.api.offset_index import IndexedRecord, OffsetIndex
from tentalis.gateway.api.record_log import LogBatch
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Keys, Scope, create
from tentalis.gateway.http.limits import stall_timeout_protocol
from tests.support.bridge_log import MemoryLog, app_over, bridge_over, client_of, served
from tests.support.join_support import head, hint, sample, score
from tests.support.kafka_fixture import eventually
from tests.support.loop_records import feedback_on, result, task

TOKENS = {
    "prompt_token_ids": [1],
    "response_token_ids": [2],
    "token_logprobs": [-0.5],
    "sampling": {"temperature": 1.0},
}
Body = Callable[[httpx.AsyncClient, MemoryLog], Awaitable[None]]


def run(body: Body, **more: Any) -> None:
    async def main() -> None:
        log = MemoryLog()
        async with client_of(log, **more) as client:
            await body(client, log)

    asyncio.run(main())


# --- the index of records ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 100), st.integers(0, 4)), max_size=60),
    st.integers(1, 10),
)
def test_index_entries_are_the_newest_of_what_came_in_the_order_of_the_log(
    came: list[tuple[int, int, int, int]], most: int
) -> None:
    index, kept = OffsetIndex(most, 50), dict[tuple[str, int, int], tuple[IndexedRecord, bytes]]()
    for partition, offset, appended, event in came:
        indexed, key = IndexedRecord("t", partition, offset, appended, f"e{event}"), b"k%d" % partition
        new = (place := ("t", partition, offset)) not in kept
        assert index.add(indexed, key, 100) is new
        kept.setdefault(place, (indexed, key))
        # From the front those that are too many or too old.
        while len(kept) > most or (kept and next(iter(kept.values()))[0].appended_at < 50):
            del kept[next(iter(kept))]
        assert len(index) == len(kept) <= most
        for partition in range(4):
            there = sorted((f for f, k in kept.values() if k == b"k%d" % partition), key=lambda f: f.offset)
            assert index.by_key("t", f"k{partition}") == there
    for name in ("e0", "e1", "e2", "e3", "e4"):
        found = index.by_id("t", name)
        assert found is None or found in [indexed for indexed, _ in kept.values()]


# --- who sees what ----------------------------------------------------------------------------------------------------


def as_(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | more


def test_a_users_key_sees_and_speaks_of_that_users_tasks_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann, bob = (create(path, [Scope.TASKS, Scope.FEEDBACK, Scope.TRACES], user=user) for user in ("ann", "bob"))
    service, watcher = create(path, [Scope.TASKS]), create(path, [Scope.EVENTS])

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        assert (await client.get("/tasks/t/status")).status_code == 401
        assert (await client.get("/tasks/t/status", headers=as_(watcher))).status_code == 403
        assert (await client.get("/health")).status_code == 200

        posted = await client.post("/tasks/assign", json={"task_id": "t", "prompt": "p"}, headers=as_(ann))
        assert posted.status_code == 201 and posted.json()["task_id"] == "t"
        (task_,) = log.topics[topics.TASKS]
        assert task_.key == "ann:t"
        # Who reads the log knows it by its name there.
        answer = {"task_id": "ann:t", "worker_id": "w", "result": "r"}
        assert (await client.post("/tasks/result", json=answer, headers=as_(service))).status_code == 201
        mine = (await client.get("/tasks/t/status", headers=as_(ann))).json()
        assert mine["status"] == "completed" and mine["task_id"] == mine["result"]["task_id"] == "t"
        assert (await client.get("/tasks/ann:t/status", headers=as_(ann))).json()["status"] == "completed"
        nothing = mine | {"status": "pending", "known": False, "result": None, "results": []}
        for name in ("t", "ann:t"):
            theirs = (await client.get(f"/tasks/{name}/status", headers=as_(bob))).json()
            assert theirs == nothing | {"task_id": name}
            told = {"task_id": name, "score": 1}
            assert (await client.post("/feedback", json=told, headers=as_(bob))).status_code == 404
            assert (await client.post("/feedback", json=told, headers=as_(ann))).status_code == 201
        assert len(log.topics[topics.FEEDBACK]) == 1
        assert (
            await client.post("/tasks/assign", json={"prompt": "p"}, headers=as_(ann, **{"X-User-Id": "bob"}))
        ).status_code == 403

        # The same name of a session is not the same session.
        turn = {"session_id": "s", "response": "r", "policy": "assistant"} | TOKENS
        for key in (ann, bob):
            assert (await client.post("/sessions/log", json=turn, headers=as_(key))).status_code == 201
        sessions = log.topics[topics.SESSIONS]
        assert len({event.key for event in sessions}) == 2
        thumb = {"completion_id": sessions[0].event_id, "thumb": "up"}
        assert (await client.post("/v1/feedback", json=thumb, headers=as_(bob))).status_code == 404
        assert (await client.post("/v1/feedback", json=thumb, headers=as_(ann))).status_code == 201

    run(body, keys=Keys(path))


def test_a_services_key_touches_what_is_the_users_for_whom_it_speaks(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    service, operator = create(path, [Scope.TASKS, Scope.FEEDBACK, Scope.TRACES]), create(path, [Scope.ADMIN])

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        def as_(user: str = "") -> dict[str, str]:
            return {"Authorization": f"Bearer {service}"} | ({"X-User-Id": user} if user else {})

        task_of_ann = {"task_id": "t", "prompt": "p"}
        assert (await client.post("/tasks/assign", json=task_of_ann, headers=as_("ann"))).status_code == 201
        answer = {"task_id": "t", "worker_id": "w", "result": "r"}
        assert (
            await client.post("/tasks/result", json=answer | {"task_id": "x"}, headers=as_("bob"))
        ).status_code == 201
        assert log.topics[topics.RESULTS][0].key == "bob:x"
        assert (await client.post("/tasks/result", json=answer, headers=as_("ann"))).status_code == 201
        turn = {"session_id": "s", "response": "r", "policy": "assistant"} | TOKENS
        logged = await client.post("/sessions/log", json=turn, headers=as_("ann"))
        said = (
            ("/feedback", {"task_id": "t", "score": 1}),
            ("/v1/feedback", {"task_id": "t", "thumb": "up"}),
            ("/v1/feedback", {"completion_id": logged.json()["session_event_id"], "thumb": "up"}),
        )
        for route, told in said:
            assert (await client.post(route, json=told, headers=as_("bob"))).status_code == 404, told
            assert topics.FEEDBACK not in log.topics
        assert not (await client.get("/tasks/t/status", headers=as_("bob"))).json()["known"]
        for number, (route, told) in enumerate(said):
            assert (await client.post(route, json=told, headers=as_("ann"))).status_code == 201, told
            assert len(log.topics[topics.FEEDBACK]) == number + 1
        assert (await client.get("/tasks/t/status", headers=as_("ann"))).json()["status"] == "completed"
        # For nobody in particular it may give feedback on every task, and reads only tasks that belong to nobody.
        told = {"task_id": "ann:t", "score": 0}
        assert (await client.post("/feedback", json=told, headers=as_())).status_code == 201
        assert not (await client.get("/tasks/ann:t/status", headers=as_())).json()["known"]
        admin = {"Authorization": f"Bearer {operator}"}
        assert (await client.get("/tasks/ann:t/status", headers=admin)).json()["status"] == "completed"

    run(body, keys=Keys(path))


def test_who_watches_for_a_user_sees_what_is_that_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    service, ann = create(path, [Scope.EVENTS]), create(path, [Scope.EVENTS], user="ann")
    admin = create(path, [Scope.ADMIN])

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        async def watched(headers: dict[str, str]) -> str:
            return (await client.get("/v1/events?seconds=0.5", headers=headers)).text

        ways = (as_(service, **{"X-User-Id": "ann"}), as_(ann), as_(service), as_(admin))
        watching = asyncio.gather(*map(watched, ways))
        while not watching.done():
            for user in ("ann", "bob"):
                log.put(topics.TASKS, task(f"of-{user}", user_id=user))
            await asyncio.sleep(0.02)
        assert [("of-ann" in text, "of-bob" in text) for text in watching.result()] == [(True, False)] * 2 + [
            (False, False),
            (True, True),
        ]
        assert (await client.get("/v1/events", headers=as_(ann, **{"X-User-Id": "bob"}))).status_code == 403

    run(body, keys=Keys(path))


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"turn_type": "side"}, "side turn"),
        ({"response_token_ids": []}, "without token ids"),
        ({"policy": ""}, "no policy"),
        ({"messages": [{"role": "user", "content": ["Look:", {"type": "image_url", "image_url": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": ["Look:", {"type": "text", "text": "a cat"}]}]}, ""),
        ({}, ""),
    ],
)
def test_a_turn_without_a_task_takes_no_feedback_and_says_so(turn: dict[str, Any], why: str) -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        logged = {"session_id": "s", "response": "r", "policy": "assistant"} | TOKENS | turn
        name = (await client.post("/sessions/log", json=logged)).json()["session_event_id"]
        answer = await client.post("/v1/feedback", json={"completion_id": name, "thumb": "up"})
        assert answer.status_code == (409 if why else 201), answer.text
        assert why in answer.text and (topics.FEEDBACK in log.topics) is not bool(why)

    run(body)


def test_a_users_own_policy_is_named_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    scopes = [Scope.TASKS, Scope.TRACES]
    ann, bob = (create(path, scopes, user=user) for user in ("ann", "bob"))
    service = create(path, scopes)
    trace = {"kind": "trace", "trace_id": "x", "recorded_at": 1, "task": "t", "prompt": "p", "response": "r"}
    posts: list[tuple[str, dict[str, Any]]] = [
        ("/tasks/assign", {"prompt": "p", "policy": "for-ann"}),
        ("/tasks/result", {"task_id": "made", "worker_id": "w", "result": "r", "model_version": "for-ann@v2"}),
        ("/sessions/log", {"session_id": "s", "response": "r", "policy": "for-ann"} | TOKENS),
    ]

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for where, post in posts:
            for other in (as_(bob), as_(service, **{"X-User-Id": "bob"})):
                refused = await client.post(where, json=post, headers=other)
                assert refused.status_code == 403 and "for-ann" in refused.text, where
        traces = {"items": [trace | {"model": "for-ann@v2"}, trace | {"model": "gpt"}]}
        taken = (await client.post("/v1/traces", json=traces, headers=as_(bob))).json()["items"]
        assert [item["status"] for item in taken] == ["refused", "published"]
        assert [len(records) for records in log.topics.values()] == [1]
        for where, post in posts:
            for allowed in (as_(ann), as_(service)):
                assert (await client.post(where, json=post, headers=allowed)).status_code == 201, where

    run(body, keys=Keys(path), personal={"for-ann": frozenset({"ann"})})


def test_two_users_may_give_the_same_ids_and_never_meet(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    scopes = [Scope.TASKS, Scope.FEEDBACK, Scope.TRACES]
    users = {user: create(path, scopes, user=user) for user in ("ann", "a:b")}
    trace = {"kind": "trace", "trace_id": "s.1", "recorded_at": 1, "task": "t", "model": "m", "prompt": "p"}
    said = {"kind": "feedback", "feedback_id": "f2", "trace_id": "s.1", "recorded_at": 2, "polarity": -1}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for user, key in users.items():
            posts: list[tuple[str, dict[str, Any]]] = [
                ("/tasks/assign", {"task_id": "t", "prompt": user}),
                ("/tasks/result", {"task_id": "t", "worker_id": "w", "result": user}),
                ("/feedback", {"task_id": "t", "score": 0.5, "feedback_id": "f"}),
                ("/feedback", {"task_id": "t", "score": 0.5}),
                (
                    "/sessions/log",
                    {"session_id": "s", "session_event_id": "e", "response": user, "policy": "p"} | TOKENS,
                ),
                ("/v1/feedback", {"completion_id": "e", "thumb": "up"}),
                ("/v1/traces", {"items": [trace | {"response": user}, said | {"text": user}]}),
            ]
            for where, post in posts:
                answers = [await client.post(where, json=post, headers=as_(key)) for _ in range(2)]
                assert {answer.status_code for answer in answers} == {201}, (user, where, answers[0].text)
                assert answers[0].json() == answers[1].json()
                if where == "/v1/traces":
                    assert [item["id"] for item in answers[0].json()["items"]] == ["s.1", "f2"]
                    assert {item["status"] for item in answers[0].json()["items"]} == {"published"}
            status = (await client.get("/tasks/t/status", headers=as_(key))).json()
            assert status["result"]["result"] == user
        counts = {topic: len(records) for topic, records in log.topics.items()}
        assert counts == {topics.TASKS: 2, topics.RESULTS: 2, topics.FEEDBACK: 8, topics.SESSIONS: 4}
        for topic, records in log.topics.items():
            assert len({record.event_id for record in records}) == counts[topic], topic

    run(body, keys=Keys(path))


def test_a_users_key_finds_tasks_that_others_made_for_that_user(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann = create(path, [Scope.TASKS, Scope.FEEDBACK], user="ann")

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        theirs = task("made-by-sessions", n=1, user_id="ann")
        log.put(topics.TASKS, theirs)
        log.put(topics.RESULTS, result(theirs))
        status = (await client.get("/tasks/made-by-sessions/status", headers=as_(ann))).json()
        assert status["status"] == "completed"
        thumb = {"task_id": "made-by-sessions", "thumb": "up"}
        assert (await client.post("/v1/feedback", json=thumb, headers=as_(ann))).status_code == 201
        assert log.topics[topics.FEEDBACK][0].key == "made-by-sessions"

    run(body, keys=Keys(path))


def test_the_key_is_looked_at_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    watcher = create(path, [Scope.EVENTS])

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        async def never() -> Any:
            pytest.fail("the body was read")
            yield b""

        for route in ("/tasks/assign", "/tasks/result", "/feedback", "/v1/feedback", "/sessions/log", "/v1/traces"):
            for headers, status in (({}, 401), (as_("tk-x-y"), 401), (as_(watcher), 403)):
                for content in (never(), b"{", b"[]"):
                    answer = await client.post(f"{route}?unheard=of", content=content, headers=headers)
                    assert (answer.status_code, set(answer.json())) == (status, {"error"}), (route, answer.text)
        for route in ("/tasks/a/status?wait=x", "/training/status?x=y", "/v1/events?seconds=-1"):
            assert (await client.get(route)).status_code == 401

    run(body, keys=Keys(path))


def test_what_is_not_to_be_recorded_is_not() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        off = {"X-Tentalis-Record": "Off"}
        for path, good in (
            ("/tasks/result", {"task_id": "t", "worker_id": "w", "result": "r"}),
            ("/sessions/log", {"session_id": "s"}),
            ("/feedback", {"task_id": "t", "score": 1}),
            ("/v1/feedback", {"task_id": "t", "thumb": "up"}),
            ("/v1/traces", {"items": [{"trace_id": "a"}, {"feedback_id": "f"}]}),
        ):
            answer = await client.post(path, json=good, headers=off)
            assert answer.status_code == 201 and "not_recorded" in answer.text
        assert [item["id"] for item in answer.json()["items"]] == ["a", "f"]
        # A task is nothing but a record: whoever wants none of it on the log wants no task.
        answer = await client.post("/tasks/assign", json={"prompt": "p"}, headers=off)
        assert answer.status_code == 422 and "X-Tentalis-Record" in answer.json()["error"]
        assert not log.topics
        for path, good in (("/tasks/assign", {"prompt": "p"}), ("/feedback", {"task_id": "t", "score": 1})):
            answer = await client.post(path, json=good, headers={"X-Tentalis-Record": "of"})
            assert answer.status_code == 400 and not log.topics

    run(body)


def test_when_it_was_said_makes_no_second_record() -> None:
    said: list[tuple[str, dict[str, Any]]] = [
        ("/feedback", {"task_id": "t", "score": 0.5}),
        ("/sessions/log", {"session_id": "s", "response": "r"}),
        ("/tasks/result", {"task_id": "t", "worker_id": "w", "result": "r"}),
    ]

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for path, once in said:
            at = [{"created_at": f"2026-01-0{day}T00:00:00Z"} for day in (1, 2)]
            answers = [await client.post(path, json=once | more) for more in ({}, *at)]
            assert {answer.status_code for answer in answers} == {201} and len({a.text for a in answers}) == 1
        assert {topic: len(records) for topic, records in log.topics.items()} == dict.fromkeys(log.topics, 1)

    run(body)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_an_idempotency_key_stands_for_the_id_that_is_not_given() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        drawn = [(await client.post("/tasks/assign", json={"prompt": "p"})).json()["task_id"] for _ in range(2)]
        key = {"Idempotency-Key": "k"}
        same = [
            (await client.post("/tasks/assign", json={"prompt": "p"}, headers=key)).json()["task_id"] for _ in range(2)
        ]
        assert len({*drawn, *same}) == 3 and len(log.topics[topics.TASKS]) == 3
        assert (await client.post("/tasks/assign", json={"prompt": "q"}, headers=key)).status_code == 409

    run(body)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"verifier": {"name": "taste"}, "task_type": "chat"}, 201),
        ({"verifier": {"name": "unheard of"}, "task_type": "chat"}, 404),
        ({"terms": {"rl": None, "opd": None}}, 422),
        ({"terms": {"rl": "result", "opens": "first_feedback"}}, 422),
        ({"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]}, 201),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400),
        ({"n_samples": 257}, 422),
        ({"task_id": "a/b"}, 422),
    ],
)
def test_what_a_task_may_say(more: dict[str, Any], status: int) -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        answer = await client.post("/tasks/assign", content=json.dumps({"prompt": "p"} | more))
        assert answer.status_code == status, answer.text
        if status == 201:
            (made,) = log.topics[topics.TASKS]
            assert isinstance(made, Task)
            assert made.terms.rl is (Source.RESULT if "verifier" in more else Source.MANAGER)
            assert [m.role for m in made.messages][:-1] == ["system"] * len(more.get("messages", []))

    run(body)


def test_of_one_sample_the_first_result_counts_and_feedback_carries_it() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        await client.post("/tasks/assign", json={"task_id": "t", "prompt": "p"})
        for worker, text in (("w1", "first"), ("w2", "second")):
            answer = {"task_id": "t", "worker_id": worker, "result": text, "model_version": "v0005"}
            assert (await client.post("/tasks/result", json=answer)).status_code == 201
        status = (await client.get("/tasks/t/status")).json()
        assert [each["result"] for each in status["results"]] == ["first"]
        assert status["result"]["model_version"] == "v0005"
        await client.post("/feedback", json={"task_id": "t", "score": 0.5})
        (said,) = log.topics[topics.FEEDBACK]
        assert isinstance(said, Feedback) and said.result is not None and said.result.text == "first"
        wrong = {"task_id": "t", "worker_id": "w3", "result": "r", "sample_index": 1}
        assert (await client.post("/tasks/result", json=wrong)).status_code == 422

    run(body)


def test_feedback_that_does_not_fit_with_its_result_goes_without() -> None:
    class Small(MemoryLog):
        async def append(self, topic: str, record: Any) -> IndexedRecord:
            if isinstance(record, Feedback) and record.result is not None:
                raise APIError(413, "too large")
            return await super().append(topic, record)

    async def main() -> None:
        log = Small()
        async with client_of(log) as client:
            log.put(topics.RESULTS, result(task("t", n=1)))
            assert (await client.post("/feedback", json={"task_id": "t", "score": 1})).status_code == 201
            (said,) = log.topics[topics.FEEDBACK]
            assert isinstance(said, Feedback) and said.result is None

    asyncio.run(main())


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 2])
def test_the_turn_that_a_person_means(lost: int) -> None:
    """`lost`: turns of the session that lie before the horizon."""

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        turns = []
        for number in range(lost, 6):
            side = number == 3
            logged = {"session_id": "s", "response": f"r{number}", "turn_type": "side" if side else "main"}
            name = (await client.post("/sessions/log", json=logged)).json()["session_event_id"]
            if not side:
                turns.append((number - (number > 3), turn_task_id("s", name), name))
        unlinked = {"session_id": "s", "turn_index": lost, "thumb": "up"}
        assert (await client.post("/v1/feedback", json=unlinked)).status_code == 404, "not linked yet"
        for index, task_id, _ in turns:
            log.put(topics.TASKS, task(task_id, n=1, run_id=None, session_id="s", turn_index=index))
        for index, task_id, name in turns:
            for where in (
                {"session_id": "s", "turn_index": index},
                {"completion_id": name},
                {"completion_id": f"chatcmpl-{name}"},
                {"completion_id": f"resp_{name}"},
                {"task_id": task_id},
            ):
                answer = await client.post("/v1/feedback", json=where | {"thumb": "down", "comment": "No."})
                assert answer.status_code == 201 and answer.json()["task_id"] == task_id, answer.text
        said = log.topics[topics.FEEDBACK]
        assert all(
            isinstance(f, Feedback) and f.source is Source.USER and f.polarity is Polarity.NEGATIVE for f in said
        )
        for nowhere in (
            {"session_id": "s", "turn_index": 9},
            {"session_id": "x", "turn_index": 0},
            {"completion_id": "x"},
        ):
            assert (await client.post("/v1/feedback", json=nowhere | {"thumb": "up"})).status_code == 404
        for wrong in (
            {"thumb": "up"},
            {"task_id": "t"},
            {"task_id": "t", "completion_id": "c", "thumb": "up"},
            {"session_id": "s", "thumb": "up"},
            {"task_id": "t", "thumb": "sideways"},
            {"task_id": None, "completion_id": "c", "thumb": "up"},
        ):
            assert (await client.post("/v1/feedback", json=wrong)).status_code == 422, wrong

    run(body)


def test_traces_are_taken_one_by_one() -> None:
    trace = {"kind": "trace", "recorded_at": 1, "task": "t", "model": "m", "prompt": "p", "response": "r"}
    said = {"kind": "feedback", "feedback_id": "f", "trace_id": "s.1", "recorded_at": 2, "text": "No.", "polarity": -1}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        items = [
            trace | {"trace_id": "s.1"},
            trace | {"trace_id": "2"},
            trace | {"trace_id": "2"},
            said,
            {"kind": "x"},
            trace | {"trace_id": "2", "response": "other"},
        ]
        for _ in range(2):
            answer = await client.post("/v1/traces", json={"items": items})
            assert [item["status"] for item in answer.json()["items"]] == ["published"] * 4 + ["refused"] * 2
        assert [event.key for event in log.topics[topics.SESSIONS]] == ["s", "2"]
        (feedback,) = log.topics[topics.FEEDBACK]
        assert feedback.key == turn_task_id("s", "s.1")
        log.away = True
        assert (await client.post("/v1/traces", json={"items": [trace | {"trace_id": "3"}]})).status_code == 503
        for wrong in ([], [5], [trace] * 101, {}):
            assert (await client.post("/v1/traces", json={"items": wrong})).status_code == 422

    run(body)


def test_what_a_client_posts_is_recorded_as_its_word() -> None:
    """It names the version that sampled and the log-probs itself: the guard counts no such answer."""
    tokens = {name.replace("token_logprobs", "sampler_logprobs"): value for name, value in TOKENS.items()}
    trace = {"kind": "trace", "trace_id": "x", "recorded_at": 1, "task": "t", "prompt": "p", "response": "r"}
    asked = {"messages": [{"role": "user", "content": "p"}], "response": "r"}
    turn = asked | {"session_id": "s", "policy": "assistant", "model": "assistant@v3"} | TOKENS
    answer = {"task_id": "t", "worker_id": "w", "result": "r", "model_version": "assistant@v3"}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        posts = [("/sessions/log", turn), ("/v1/traces", {"items": [trace | tokens | {"model": "assistant@v3"}]})]
        for path, posted in [*posts, ("/tasks/result", answer)]:
            assert (await client.post(path, json=posted)).status_code == 201
        events = [event for event in log.topics[topics.SESSIONS] if isinstance(event, SessionEvent)]
        results = [each for each in log.topics[topics.RESULTS] if isinstance(each, Result)]
        turns = [result_of(event, 0, 0) for event in events]
        assert [each.policy_spans[0].policy for each in turns + results] == ["assistant@v3"] * 3
        assert {sample_of(each).recorded_by for each in turns + results} == {RecordedBy.CLIENT}

    run(body)


def test_a_result_that_an_earlier_gateway_took_is_the_same_result() -> None:
    answer = {"task_id": "t", "worker_id": "w", "result": "r"}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        await client.post("/tasks/assign", json={"task_id": "t", "prompt": "p"})
        first = (await client.post("/tasks/result", json=answer)).json()["result_id"]
        (written,) = log.topics[topics.RESULTS]
        log.topics[topics.RESULTS][0] = written.model_copy(update={"recorded_by": RecordedBy.UNKNOWN})
        again = await client.post("/tasks/result", json=answer)
        assert (again.status_code, again.json()["result_id"]) == (201, first), again.text

    run(body)


def test_a_trace_of_a_policys_version_with_its_tokens_can_be_trained_on() -> None:
    trace = {"kind": "trace", "trace_id": "x", "recorded_at": 1, "task": "t", "prompt": "p", "response": "r"}
    tokens = {name.replace("token_logprobs", "sampler_logprobs"): value for name, value in TOKENS.items()}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        items = [
            trace | tokens | {"model": "assistant@v3"},
            trace | {"model": "assistant@v3", "trace_id": "y"},
            trace | tokens | {"model": "gpt-x", "trace_id": "z"},
        ]
        assert (await client.post("/v1/traces", json={"items": items})).status_code == 201
        events = [event for event in log.topics[topics.SESSIONS] if isinstance(event, SessionEvent)]
        whole, bare, plain = (not_trainable(event, 1_000, 2**20) for event in events)
        assert (events[0].policy, whole, plain) == ("assistant", None, "no policy")
        assert bare is not None and "without token ids" in bare

    run(body)


# --- hints ------------------------------------------------------------------------------------------------------------


def test_the_status_of_a_task_has_its_hints_with_their_source(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann, bob = (create(path, [Scope.TASKS], user=user) for user in ("ann", "bob"))
    answered = result(task("t", n=1, user_id="ann"))
    said = feedback_on(answered, "f").model_copy(update={"source": Source.USER, "author": "ann", "text": "Shorter."})
    of = sample_of(answered)
    from_ann = hint(of, id="h").model_copy(update={"feedback_id": "f"})
    lesson = hint(of, id="l").model_copy(update={"feedback_id": None, "hinter": "lesson/1"})
    stranger = feedback_on(result(task("other", n=1)), "g").model_copy(update={"text": "Secret."})
    crossed = hint(of, id="x").model_copy(update={"feedback_id": "g"})

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        log.put(topics.RESULTS, answered)
        for feedback in (said, stranger):
            log.put(topics.FEEDBACK, feedback)
        for half in (score(of), from_ann, hint(of, HintKind.NONE, id="n"), from_ann, lesson, crossed):
            log.put(topics.HALVES, half)
        first, second, third = (await client.get("/tasks/t/status", headers=as_(ann))).json()["hints"]
        assert first == {
            "sample_index": 0,
            "kind": "accepted",
            "hints": ["Be brief."],
            "made_by": "rule/1",
            "feedback_id": "f",
            "said": {"source": "user", "author": "ann", "text": "Shorter."},
        }
        assert (second["made_by"], second["feedback_id"], second["said"]) == ("lesson/1", None, None)
        assert (third["feedback_id"], third["said"]) == ("g", None), "feedback on another task is not shown"
        assert (await client.get("/tasks/t/status", headers=as_(bob))).json()["hints"] == []

    run(body, keys=Keys(path))


# --- events -----------------------------------------------------------------------------------------------------------


def test_a_misspelt_kind_of_event_is_refused() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        assert (await client.get("/v1/events?types=result,step&seconds=0.1")).status_code == 200
        refused = await client.get("/v1/events?types=results&seconds=0.1")
        assert refused.status_code == 422 and "task|result|feedback" in refused.json()["error"]

    run(body)


def test_the_event_of_a_hint_names_its_source_and_not_its_words() -> None:
    made = hint(sample(head("t")), source=Source.NEXT_STATE).model_copy(update={"feedback_id": "f"})
    found = event_of(IndexedRecord(topics.HALVES, 0, 7, 1), made)
    assert found is not None
    name, user, content = found
    assert (name, user, content["task_id"], content["sample_index"]) == ("hint", "user-t", "t", 0)
    assert (content["source"], content["hinter"], content["feedback_id"]) == ("next_state", "rule/1", "f")
    assert "Be brief." not in json.dumps(content)


def test_events_are_live_bounded_and_say_nothing_of_what_was_said() -> None:
    async def main() -> None:
        events = LiveEvents()
        everything = frozenset({"task", "result"})
        slow, quick, ann = (
            events.watch(everything, None, 60, everybody=True),
            events.watch(everything, None, 60, everybody=True),
            events.watch(everything, "ann", 60),
        )
        for stream in (slow, quick, ann):
            assert (await anext(stream)).startswith(b":")
        assert events.has_clients
        secret = task("t", user_id="bob")
        for number in range(MAX_QUEUED_EVENTS + 5):
            events.publish(IndexedRecord(topics.TASKS, 0, number, 1), secret)
            assert b"event: task" in (text := await anext(quick)) and b"purr" not in text
        events.publish(IndexedRecord(topics.RESULTS, 0, 1, 1), result(task("t", user_id="ann")))
        assert b"event: result" in await anext(ann)
        rest = [text async for text in slow]
        assert len(rest) == MAX_QUEUED_EVENTS + 1 and rest[-1].startswith(b"event: dropped") and b"faster" in rest[-1]
        for stream in (quick, ann):
            await stream.aclose()  # type: ignore[attr-defined]
        assert not events.has_clients

        many = [events.watch(everything, None, 60, everybody=True) for _ in range(MAX_CLIENTS)]
        for stream in many:
            await anext(stream)
        with pytest.raises(APIError, match="all 64 streams are in use: try again later"):
            events.watch(everything, None, 60, everybody=True)
        for stream in many:
            await stream.aclose()  # type: ignore[attr-defined]
        over = [text async for text in events.watch(everything, None, 0.05, everybody=True)]
        assert over[-1].startswith(b"event: end")

    asyncio.run(main())


def test_a_reader_that_stops_reading_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tentalis.gateway.api.events.MAX_CLIENTS", 1)
    loops: list[asyncio.AbstractEventLoop] = []

    class Log(MemoryLog):
        def start(self, take: Callable[[LogBatch], None], wanted: Callable[[], bool]) -> None:
            loops.append(asyncio.get_running_loop())
            super().start(take, wanted)

    log = Log()
    bridge = bridge_over(log)
    long = PolicyAck(server_id="s", policy="p", version=1, event_time=1, sha256="0" * 64, ok=False, error="x" * 2**20)
    with (
        served(app_over(bridge), http=stall_timeout_protocol(10.0, 0.3)) as url,
        httpx.Client(base_url=url, timeout=30) as client,
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), 30) as stuck,
    ):
        stuck.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: bridge.events.has_clients, 30)
        assert client.get("/v1/events", params={"seconds": 0.1}).status_code == 503
        for _ in range(32):  # more than the buffers on the way hold
            loops[0].call_soon_threadsafe(log.put, topics.POLICY_ACKS, long)
        eventually(lambda: client.get("/v1/events", params={"seconds": 0.1}).status_code == 200, 30)
        # Its connection is closed too, in the midst of what it has not read.
        heard = 0
        while piece := stuck.recv(2**20):
            heard += len(piece)
        assert heard < 32 * 2**20


def test_polls_end_when_the_result_comes_however_many_wait() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        log.put(topics.TASKS, task("t", n=1))
        polls = [asyncio.create_task(client.get("/tasks/t/status")) for _ in range(20)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        log.put(topics.RESULTS, result(task("t", n=1)))
        answers = await asyncio.wait_for(asyncio.gather(*polls), 10)
        assert {answer.json()["status"] for answer in answers} == {"completed"} and time.monotonic() - began < 10
        (there,) = log.topics[topics.RESULTS]
        assert isinstance(there, Result)

    run(body)
