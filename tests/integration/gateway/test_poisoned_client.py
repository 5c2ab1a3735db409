"""A client with a user's key, and one that writes to Kafka itself, poison a run: what they send reaches no step."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas import topics
from schemas.records import PolicySpan, Rollout, Sampling, Source, Terms
from tentalis.dlq.actions import raw_of
from tentalis.dlq.records import letter_of
from tentalis.gateway.http.keys import Keys, Scope, create
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.local.broker import EmbeddedBroker
from tentalis.text.timestamps import now_ms
from tests.integration.gateway.test_bridge_broker import bridge
from tests.support.apps_lab import Apps
from tests.support.kafka_fixture import eventually
from tests.support.loop_lab import Lab
from tests.support.stream_records import make_feedback, make_result, make_task
from tests.support.trainer_lab import VOCAB, rollout
from trainer.config.loss import LossConfig
from trainer.data.fetch import RolloutCache
from trainer.data.plan import BatchPlanner
from trainer.data.rollout_reader import RolloutReader

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

ORDINARY = 26
POISON = {"temperature": 1e-39}


def post(client: httpx.Client, task_id: str, **more: Any) -> list[httpx.Response]:
    """Posts a task, its result with tokens and log-probs, and feedback. `more`: fields of the result. On a busy machine
    the log may answer late: 503, and the same request again is safe."""
    task = {"task_id": task_id, "prompt": "Sort.", "policy": "tiny", "terms": {"rl": "manager", "opd": None}}
    result = {"task_id": task_id, "worker_id": "w", "result": "ok", "model_version": "tiny@v0"} | more
    tokens = {"prompt_token_ids": [3, 4, 5], "response_tokens": [{"id": 10, "logprob": -4.0}] * 2}
    bodies = {
        "/tasks/assign": task,
        "/tasks/result": result | tokens,
        "/feedback": {"task_id": task_id, "score": 0.8},
    }

    def sent(path: str, body: dict[str, Any]) -> httpx.Response:
        answer = client.post(path, json=body)
        assert answer.status_code != 503, answer.text
        return answer

    return [eventually(partial(sent, *each), 120) for each in bodies.items()]


def test_poison_is_refused_by_the_bridge_and_dropped_by_name_behind_it(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    lab = Lab(own_broker.bootstrap, unique)
    keys = tmp_path / "keys.json"
    key = create(keys, [Scope.TASKS, Scope.FEEDBACK], user="ann")
    with Apps(lab.settings, tmp_path) as apps, bridge(lab, Keys(keys)) as client:
        apps.start("scoring")
        apps.start("join")
        # Past the bridge: a result that becomes a rollout, a rollout, and one whose digest is that of other content.
        task = make_task("result", policy="tiny", n_samples=1, terms=Terms(rl=Source.MANAGER), verifier=None)
        spans = (PolicySpan(start=0, policy="tiny@v0"),)
        result = make_result(task, sampling=Sampling(**POISON), policy_spans=spans, opened_at=now_ms())
        lab.put(topics.RESULTS, result)
        lab.put(topics.FEEDBACK, make_feedback(result, source=Source.MANAGER, score=0.8))
        forged = rollout("forged", policy="tiny").model_copy(update={"sampling": Sampling(**POISON)})
        lab.put(topics.ROLLOUTS, rollout("rollout", policy="tiny", **POISON), forged)
        apps.wait(lambda: len(apps.read(topics.ROLLOUTS, Rollout)) == 3)

        client.headers["Authorization"] = f"Bearer {key}"
        assigned, refused = post(client, "poison", sampling=POISON)[:2]
        assert (assigned.status_code, refused.status_code) == (201, 422)
        assert "sampling.temperature" in refused.json()["error"]
        for number in range(ORDINARY):
            assert [each.status_code for each in post(client, f"t{number}")] == [201, 201, 201]
        apps.wait(lambda: len(apps.read(topics.ROLLOUTS, Rollout)) == 3 + ORDINARY)
    assert plan(lab) == (
        {f"ann:t{number}" for number in range(ORDINARY)},
        {"temperature out of bounds": 2},
    )
    (letter,) = (letter_of(raw_of(each)) for each in messages_to_end(lab.settings, topics.dlq(topics.ROLLOUTS)))
    assert letter.key == b"forged/0" and ": forged: the content of forged/0 " in letter.error


def plan(lab: Lab) -> tuple[set[str], dict[str, int]]:
    """Reads the rollouts as a trainer does; returns the tasks of its next batch, and the number of drops by reason."""
    ends = end_offsets(lab.settings, topics.ROLLOUTS)
    start = dict.fromkeys(ends, 0)
    reader = RolloutReader(
        lab.settings,
        lab.codec,
        lab.publisher,
        RolloutCache(),
        policy="tiny",
        rank=0,
        vocab_size=VOCAB,
        max_tokens=128,
        loss=LossConfig(),
        low_water=start,
    )
    planner = BatchPlanner(ORDINARY, 1000, {}, start)

    def caught_up() -> bool:
        for segment in reader.poll(0.1):
            planner.add_segment(segment)
        return planner.caught_up(ends)

    try:
        eventually(caught_up, 60)
    finally:
        reader.close()
    draft = planner.next_draft(0, ends)
    assert draft is not None, planner.count_usable(0)
    drops: Counter[str] = Counter()
    for drop in draft.drops:
        drops[drop.reason] += drop.count
    return {offer.task_id for offer in draft.offers}, drops
