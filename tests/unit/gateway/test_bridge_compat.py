"""Compatibility of the bridge with that of the earlier systems."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from schemas import topics
from schemas.records import BackPressure, LogprobsMode, Result, SessionEvent, Source, Task
from tentalis.gateway.api.service import LONGEST_POLL_S
from tentalis.gateway.api.training import GroupAnswer
from tests.support.bridge_log import MemoryLog, client_of
from tests.support.loop_records import ack, manifest, outcome, plan, promotion, step_result, update

TASK = {"task_id": "t1", "manager_id": "m", "task_type": "coding", "prompt": "Sort a list."}
RESULT = {"task_id": "t1", "worker_id": "w", "prompt": "Sort a list.", "result": "sorted(xs)", "steps": ["Think."]}
FEEDBACK = {"task_id": "t1", "manager_id": "m", "worker_id": "w", "score": 0.25, "textual_feedback": "Too short."}
SESSION = {
    "session_id": "s1",
    "worker_id": "w",
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "response": "Hello",
    "token_logprobs": [-0.5],
}
POSTS = {"/tasks/assign": TASK, "/tasks/result": RESULT, "/feedback": FEEDBACK, "/sessions/log": SESSION}

Body = Callable[[httpx.AsyncClient, MemoryLog], Awaitable[None]]


def run(body: Body, **more: Any) -> None:
    async def main() -> None:
        log = MemoryLog()
        async with client_of(log, **more) as client:
            await body(client, log)

    asyncio.run(main())


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_good_no_json_wrong_and_arrays(path: str) -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for content, status in [(b"{", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b"", 400)]:
            answer = await client.post(path, content=content)
            assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
        wrong: list[tuple[Any, int]] = [([], 400), ([POSTS[path]], 400), (None, 400), ("text", 400), ({}, 422)]
        for bad, status in [*wrong, (POSTS[path] | {"worker_id": 5, "prompt": 5}, 422)]:
            answer = await client.post(path, content=json.dumps(bad))
            assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
        assert not log.topics, "what was refused was written"
        # Fields that nobody knows were ignored by theirs; and their clients sent JSON under any name.
        answer = await client.post(path, json=POSTS[path] | {"unheard_of": 1})
        assert answer.status_code == 201 and answer.json()["status"] == "published"
        ids = {"task_id": "t1"} if path != "/sessions/log" else {"session_id": "s1"}
        assert ids.items() <= answer.json().items()

    run(body)


def test_json_under_any_content_type() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            answer = await client.post(
                "/feedback", content=b'{"task_id": "t", "score": 1}', headers={"Content-Type": kind}
            )
            assert answer.status_code == 201, answer.text

    run(body)


def test_scores_outside_0_and_1_are_422_and_say_why() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for score in ("1.5", "-0.1", "NaN", '"high"'):
            answer = await client.post("/feedback", content=b'{"task_id": "t1", "score": %s}' % score.encode())
            assert answer.status_code == (400 if score == "NaN" else 422), answer.text
            assert score == "NaN" or "score" in answer.json()["error"]

    run(body)


def test_a_task_its_result_and_its_status() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        assert (await client.get("/tasks/t1/status")).json() == {
            "task_id": "t1",
            "status": "pending",
            "known": False,
            "result": None,
            "results": [],
            "outcomes": [],
            "hints": [],
        }, "unknown ids are pending at once"
        answer = await client.post("/tasks/assign", json=TASK)
        assert answer.json() == {"task_id": "t1", "topic": topics.TASKS, "status": "published"}
        pending = (await client.get("/tasks/t1/status", params={"wait": 0})).json()
        assert pending["status"] == "pending" and pending["known"]

        waiting = asyncio.create_task(client.get("/tasks/t1/status"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await client.post("/tasks/result", json=RESULT)).status_code == 201
        answer = await asyncio.wait_for(waiting, 5)
        completed = answer.json()
        assert completed["status"] == "completed" and completed["result"]["result"] == "sorted(xs)"
        theirs = {"task_id", "worker_id", "prompt", "result", "status", "steps", "elapsed_seconds", "model_version"}
        assert theirs <= set(completed["result"]) and completed["result"]["status"] == "success"
        assert (await client.get("/tasks/t1/status")).json() == completed, "an answer does not go away by being read"

        (task,), (result,) = log.topics[topics.TASKS], log.topics[topics.RESULTS]
        assert isinstance(task, Task) and isinstance(result, Result) and result.task == task
        assert task.terms.rl is task.terms.opd is Source.MANAGER and task.metadata["task_type"] == "coding"
        log.put(topics.OUTCOMES, outcome(task, reward=0.5))
        assert (await client.get("/tasks/t1/status")).json()["outcomes"][0]["reward"] == 0.5

    run(body)


def test_the_result_before_the_poll_and_before_the_task() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        failed = RESULT | {"task_id": "t9", "status": "failed", "result": "no compiler"}
        assert (await client.post("/tasks/result", json=failed)).status_code == 201
        answer = (await client.get("/tasks/t9/status")).json()
        assert answer["status"] == "completed" and answer["result"]["status"] == "failed"
        assert (await client.post("/tasks/assign", json=TASK | {"task_id": "t9"})).status_code == 201
        assert (await client.get("/tasks/t9/status")).json() == answer

    run(body)


def test_a_long_poll_ends_with_pending() -> None:
    assert LONGEST_POLL_S == 30.0

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        await client.post("/tasks/assign", json=TASK | {"n_samples": 2})
        await client.post("/tasks/result", json=RESULT)
        answer = (await client.get("/tasks/t1/status")).json()
        assert answer["status"] == "pending" and answer["result"] is None and len(answer["results"]) == 1
        for wrong in ({"wait": 31}, {"timeout": 5}):
            assert (await client.get("/tasks/t1/status", params=wrong)).status_code == 422
        await client.post("/tasks/result", json=RESULT | {"sample_index": 1})
        assert (await client.get("/tasks/t1/status")).json()["status"] == "completed"

    run(body, longest_poll_s=0.05)


@pytest.mark.parametrize("path", POSTS)
def test_twice_is_once_and_another_under_the_same_id_is_a_conflict(path: str) -> None:
    ids = {"/feedback": {"feedback_id": "f1"}, "/sessions/log": {"session_event_id": "e1"}}.get(path, {})
    changed = {"prompt": "Other."} if path == "/tasks/assign" else {"result": "Other", "textual_feedback": "Other."}
    good = POSTS[path] | ids

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        answers = await asyncio.gather(*(client.post(path, json=good) for _ in range(5)))
        answers.append(await client.post(path, json=good | {"created_at": "2026-01-01T00:00:00Z"} if ids else good))
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.text for answer in answers}) == 1
        assert sum(map(len, log.topics.values())) == 1
        answer = await client.post(path, json=good | changed | {"response": "Other"})
        assert answer.status_code == 409 and set(answer.json()) == {"error"}
        assert sum(map(len, log.topics.values())) == 1

    run(body)


def test_nothing_is_accepted_that_the_log_did_not_acknowledge() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        log.away = True
        for path, good in POSTS.items():
            answer = await client.post(path, json=good)
            assert answer.status_code == 503 and answer.headers["retry-after"] and "error" in answer.json()
        log.away = False
        for path, good in POSTS.items():
            assert (await client.post(path, json=good)).status_code == 201

    run(body)


def test_a_session_is_not_trainable_unless_its_tokens_are_given() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        await client.post("/sessions/log", json=SESSION)
        tokens = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "sampling": {"temperature": 0.7}}
        await client.post("/sessions/log", json=SESSION | tokens)
        without, given = log.topics[topics.SESSIONS]
        assert isinstance(without, SessionEvent) and isinstance(given, SessionEvent)
        assert without.not_trainable and not without.sampler_logprobs
        assert not given.not_trainable and given.logprobs_mode is LogprobsMode.PROCESSED
        assert len(given.response_token_ids) == len(given.sampler_logprobs) == 4

    run(body)


def test_training_status_is_the_real_state() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        async def status() -> dict[str, Any]:
            return dict((await client.get("/training/status")).json())

        nothing = await status()
        assert nothing["runs"] == nothing["policies"] == [] and nothing["status"] == "ok"
        assert set(nothing["components"].values()) == {"inactive"}
        assert {"prm_evaluator", "training_loop", "combined_rollout_builder"} <= set(nothing["components"])

        log.put(topics.RUNS, manifest())
        log.put(topics.BATCHES, plan(1, ["a"]))
        log.put(topics.BATCHES, step_result(1, 2, metrics={"loss": 0.5}))
        log.put(topics.BATCHES, plan(2, ["b"]))
        log.put(topics.POLICIES, update(1))
        log.put(topics.POLICIES, update(2))
        log.put(topics.POLICIES, promotion(2))
        log.put(topics.POLICY_ACKS, ack(1))
        log.seen = {
            "tentalis-trainer-assistant": GroupAnswer(state="active", members=1, lag=3),
            "tentalis-scoring": GroupAnswer(state="inactive", members=0, lag=7),
        }
        now = await status()
        (run_,), (policy,) = now["runs"], now["policies"]
        assert (run_["last_step"], run_["planned_step"], run_["policy_version"]) == (1, 2, 2)
        assert run_["metrics"] == {"loss": 0.5} and run_["last_step_age_s"] > 0
        # Planned long ago, and no step came of it.
        assert run_["state"] == "standing"
        assert (policy["newest_version"], policy["promoted_version"], policy["served_version"]) == (2, 2, 1)
        assert policy["versions_behind"] == 1 and policy["served_by"]
        assert now["components"]["training_loop"] == "active" and now["components"]["prm_evaluator"] == "inactive"
        assert now["consumer_groups"]["tentalis-scoring"]["lag"] == 7

        log.put(topics.BATCHES, step_result(2, 3))
        assert (await status())["runs"][0]["state"] == "waiting"
        log.seen = {}
        assert (await status())["runs"][0]["state"] == "stopped"
        log.seen, log.stale_reason = None, "no broker"
        gone = await status()
        assert gone["status"] == "stale" and set(gone["components"].values()) == {"unknown"}
        assert gone["runs"][0]["state"] is None

    run(body)


def test_back_pressure_is_told_while_it_holds() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        log.put(topics.POLICIES, update(1))
        for expires, reason in ((0, None), (2**50, "full")):
            pressure = BackPressure(
                policy="assistant",
                run_id="r",
                event_time=1,
                closed=True,
                waiting=1,
                ahead=1,
                max_staleness=0,
                expires_at=expires,
                reason="full",
            )
            log.put(topics.POLICIES, pressure)
            assert (await client.get("/training/status")).json()["policies"][0]["back_pressure"] == reason

    run(body)
