"""The bridge on a real broker, end to end: what is posted is on the log once, and what is asked comes from there."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Message, Record, Result, SessionEvent, Task, Terms, sample_of
from tentalis.gateway.api.log import KafkaLog
from tentalis.gateway.api.routes import router
from tentalis.gateway.api.service import Bridge
from tentalis.gateway.http.keys import Keys
from tentalis.gateway.recording.event_log import EventLog
from tentalis.local.broker import EmbeddedBroker
from tentalis.traces import TraceClient
from tests.support.gateway_lab import listening
from tests.support.join_support import hint, open_, score
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab
from tests.support.loop_records import manifest, outcome, promotion, step_result, update

pytestmark = pytest.mark.broker


@contextmanager
def bridge(lab: Lab, keys: Keys = Keys(None)) -> Iterator[httpx.Client]:
    """One gateway's bridge. `keys`: those that it asks for."""
    events = EventLog(lab.settings, "tentalis/test", lab.codec)
    log = KafkaLog(lab.settings, events, horizon_ms=3_600_000, max_records=10_000)
    service = Bridge(log, gateway_id="g", policy=lab.name)
    app = FastAPI()
    app.include_router(router(service, keys, body_bytes=2**20, body_s=10.0))
    with listening(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        # Not /health: on a shared broker it also tells of the stream applications that earlier tests ran.
        eventually(lambda: service.stale_reason is None, 60)
        yield client
    events.close()


def mine(lab: Lab, topic: str) -> list[Any]:
    return lab.records(topic, lambda record: lab.name in record.key)


def test_two_gateways_share_one_log(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    lab = Lab(kafka.bootstrap, unique)
    name = f"{unique}.1"
    task = {"task_id": name, "manager_id": "m", "task_type": "coding", "prompt": "Sort.", "metadata": {"a": 1}}
    result = {"task_id": name, "worker_id": "w", "prompt": "Sort.", "result": "sorted"}
    told = {"task_id": name, "manager_id": "m", "worker_id": "w", "score": 0.2, "textual_feedback": "Shorter."}
    with ExitStack() as stack:
        one, other = stack.enter_context(bridge(lab)), stack.enter_context(bridge(lab))
        heard: list[str] = []
        watching = threading.Thread(target=watch, args=(other, name, heard), daemon=True)
        watching.start()
        eventually(lambda: heard, 30)

        assert one.post("/tasks/assign", json=task).status_code == 201
        eventually(lambda: other.get(f"/tasks/{name}/status", params={"wait": 0}).json()["known"], 30)
        assert other.post("/tasks/assign", json=task).status_code == 201
        assert other.post("/tasks/assign", json=task | {"prompt": "Other."}).status_code == 409

        polled: list[Any] = []
        polling = threading.Thread(target=lambda: polled.append(one.get(f"/tasks/{name}/status").json()), daemon=True)
        polling.start()
        assert other.post("/tasks/result", json=result).status_code == 201
        polling.join(30)
        assert polled and polled[0]["status"] == "completed" and polled[0]["result"]["result"] == "sorted"
        assert one.post("/feedback", json=told).status_code == 201

        (written,), (answered,), (said,) = (
            mine(lab, topic) for topic in (topics.TASKS, topics.RESULTS, topics.FEEDBACK)
        )
        assert isinstance(written, Task) and isinstance(answered, Result)
        assert answered.task == written and said.result == answered
        lab.put(topics.OUTCOMES, outcome(written, reward=0.5))
        eventually(lambda: one.get(f"/tasks/{name}/status").json()["outcomes"], 30)

        # Of the halves only hints are indexed.
        indexed = one.get("/health").json()["facts"]
        sample = sample_of(answered)
        made = hint(sample, id=f"{name}-h").model_copy(update={"feedback_id": said.feedback_id})
        lab.put(topics.HALVES, open_(written.head), score(sample), made)
        eventually(lambda: one.get(f"/tasks/{name}/status").json()["hints"], 30)
        (hinted,) = one.get(f"/tasks/{name}/status").json()["hints"]
        assert hinted["said"] == {"source": "manager", "author": "m", "text": "Shorter."}
        assert one.get("/health").json()["facts"] == indexed + 1

        # What was recorded while no gateway was there, and thumbs on it: by its id, and by the turn's number.
        client = TraceClient("http://127.0.0.1:1", None, tmp_path)
        trace_id = client.record("t", "m", "Why?", "Because.", session_id=unique)
        client.submit_language_feedback(trace_id, "Too short.", "negative")
        client.close(0.0)
        for _ in range(2):
            with TraceClient(str(one.base_url), None, tmp_path) as client:
                assert client.flush(60) and not client.stats().refused, client.stats()
            (tmp_path / "front").unlink()  # as if nothing of it had been let go: everything is sent again
        (turn,) = mine(lab, topics.SESSIONS)
        assert isinstance(turn, SessionEvent) and turn.session_event_id == trace_id and turn.not_trainable
        turn_task = turn_task_id(unique, trace_id)
        lab.put(topics.TASKS, task_of_turn(turn_task, unique, 7, lab.name))
        by_number = {"session_id": unique, "turn_index": 7, "thumb": "down"}
        eventually(lambda: other.post("/v1/feedback", json=by_number).status_code == 201, 30)
        answer = other.post("/v1/feedback", json={"completion_id": trace_id, "comment": "Thanks."})
        assert answer.json()["task_id"] == turn_task
        on_turn = lab.records(topics.FEEDBACK, lambda record: record.task_id == turn_task)
        assert Counter((f.polarity.value, f.text) for f in on_turn) == Counter(
            [("negative", "Too short."), ("negative", ""), ("none", "Thanks.")]
        )

        run = manifest(unique).model_copy(update={"policy": lab.name})
        steps: list[tuple[str, Record]] = [
            (topics.RUNS, run),
            (topics.BATCHES, step_result(1, 2, unique, policy=lab.name)),
            (topics.POLICIES, update(2, policy=lab.name)),
            (topics.POLICIES, promotion(2).model_copy(update={"policy": lab.name})),
        ]
        for topic, record in steps:
            lab.put(topic, record)

        def trained() -> bool:
            status = one.get("/training/status").json()
            runs = [each for each in status["runs"] if each["run_id"] == unique]
            policies = [each for each in status["policies"] if each["policy"] == lab.name]
            return bool(
                status["status"] == "ok"
                and runs
                and (runs[0]["last_step"], runs[0]["state"]) == (1, "stopped")
                and policies
                and policies[0]["promoted_version"] == 2
                and status["components"]["prm_evaluator"] != "unknown"
            )

        eventually(trained, 30)
        watching.join(60)
    assert heard[1:] == ["task", "result", "feedback"]

    # A gateway that starts anew knows what is on the log.
    with bridge(lab) as third:
        assert third.get(f"/tasks/{name}/status").json()["status"] == "completed"
        assert third.post("/tasks/result", json=result).status_code == 201
        assert third.post("/tasks/result", json=result | {"result": "other"}).status_code == 409
    assert len(mine(lab, topics.RESULTS)) == 1


def test_health_is_degraded_while_the_broker_is_down(own_broker: EmbeddedBroker, unique: str) -> None:
    lab = Lab(own_broker.bootstrap, unique)
    task = {"task_id": unique, "prompt": "Sort."}

    def said(path: str) -> Any:
        return client.get(path).json()["status"]

    with bridge(lab) as client:
        assert said("/training/status") == "ok"
        own_broker.kill()
        eventually(lambda: said("/health") == "degraded", 60)
        assert said("/training/status") == "stale"
        own_broker.start()
        own_broker.wait_ready()
        eventually(lambda: (said("/health"), said("/training/status")) == ("ok", "ok"), 120)
        assert client.post("/tasks/assign", json=task).status_code == 201
        eventually(lambda: client.get(f"/tasks/{unique}/status", params={"wait": 0}).json()["known"], 30)


def watch(client: httpx.Client, name: str, heard: list[str]) -> None:
    with client.stream("GET", "/v1/events", params={"types": "task,result,feedback", "seconds": 60}) as stream:
        kind = ""
        for line in stream.iter_lines():
            if line.startswith(":") and not heard:
                heard.append("connected")
            if line.startswith("event: "):
                kind = line[7:]
            if line.startswith("data: ") and json.loads(line[6:]).get("task_id") == name:
                heard.append(kind)
            if len(heard) == 4:
                return


def task_of_turn(task_id: str, session_id: str, turn_index: int, policy: str) -> Task:
    return Task(
        task_id=task_id,
        event_time=int(time.time() * 1000),
        policy=policy,
        environment="chat",
        messages=(Message(role="user", content="Why?"),),
        terms=Terms(),
        session_id=session_id,
        turn_index=turn_index,
    )
