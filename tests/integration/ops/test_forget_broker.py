"""Somebody leaves a run that was trained: join, trainer, verifier and replay on a real broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.ids import policy_name
from schemas.records import LogprobsMode, PolicySpan, Result, Source, Status, Task, Terms, result_id, sample_of
from schemas.tensors import float32_bytes, int32_bytes
from streams.apps.scoring.core import opened_by_task
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.local.broker import EmbeddedBroker
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import Verdict
from tentalis.text.timestamps import now_ms
from tests.support import forget_lab
from tests.support.forget_lab import POLICY, RUN
from tests.support.join_support import hint
from tests.support.kafka_fixture import eventually
from tests.support.trainer_lab import config, tiny_model
from trainer.config.trainer_config import config_text
from trainer.data.fetch import BadRollouts, look_up_rollouts
from trainer.replay.replay import replay
from trainer.run.run_log import read_run

pytestmark = [  # test_forget_live_broker.py forgets amid a conversation
    pytest.mark.broker,
    pytest.mark.long,
    pytest.mark.usefixtures("few_partitions"),
]

LEAVER = "session-of-the-leaver"
MARK = "zanzibar"
TOKENS = [61, 62, 63, 60, 62, 61]
TRACES = (MARK.encode(), int32_bytes(TOKENS), LEAVER.encode())
(CHANGELOG,) = topology.named("join").changelogs


class Stage(forget_lab.Stage):
    """A broker with a join on it, and what worker, scoring and the one who leaves say there."""

    def answered(self, number: int, session: str, **terms: Any) -> Result:
        """A task, its answer and its score, as worker and scoring write them."""
        now, reward = now_ms(), (-1.0) ** number * 0.5
        tokens = TOKENS if session == LEAVER else [10 + number, 11, 12]
        task = Task(
            task_id=f"task-{number}",
            event_time=now,
            policy=POLICY,
            environment="chat",
            messages=({"role": "user", "content": MARK},),
            terms=Terms(**terms),
            run_id=RUN,
            session_id=session,
            user_id=f"user of {session}",
        )
        spans = (PolicySpan(start=0, policy=policy_name(POLICY, 0)),)
        response = int32_bytes(tokens)
        result = Result(
            result_id=result_id(task.task_id, 0, spans, response, ""),
            event_time=now,
            opened_at=now,
            task=task,
            sample_index=0,
            worker_id="worker",
            status=Status.OK,
            prompt_token_ids=int32_bytes([3, 4 + number]),
            response_token_ids=response,
            sampler_logprobs=float32_bytes([-4.0] * len(tokens)),
            logprobs_mode=LogprobsMode.PROCESSED,
            policy_spans=spans,
        )
        opened = opened_by_task(task, now)
        assert opened is not None
        named = MARK if session == LEAVER else "plain"
        score = score_of_result(result, Verdict(reward, {named: reward}), "rule/1", now)
        for topic, record in (
            (topics.TASKS, task),
            (topics.RESULTS, result),
            (topics.HALVES, opened),
            (topics.HALVES, score),
        ):
            self.publisher.send(topic, record)
        self.publisher.flush()
        return result

    def left(self, topic: str) -> set[str | None]:
        """Keys whose newest value has anything of the one who leaves in it."""
        newest = self.newest(topic)
        return {key for key, stored in newest.items() if any(trace in (stored.value or b"") for trace in TRACES)}


@pytest.fixture
def stage(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Stage]:
    found = Stage(own_broker, tmp_path)
    found.serve("join")
    try:
        yield found
    finally:
        found.end()


def test_a_forgotten_session_leaves_redacted_rollouts_and_no_live_state(stage: Stage, tmp_path: Path) -> None:
    for number in range(4):
        stage.answered(number, "stays")
    eventually(lambda: len(stage.newest(topics.ROLLOUTS)) == 4, 60, 0.2)
    for number in range(4, 8):
        stage.answered(number, LEAVER if number % 2 else "stays")
    eventually(lambda: len(stage.newest(topics.ROLLOUTS)) == 8, 60, 0.2)
    of = config(
        tiny_model(tmp_path / "model"),
        run_id=RUN,
        policy=POLICY,
        batch_rollouts=4,
        steps=2,
        start=dict.fromkeys(range(topics.table().keyed_partitions), 0),
    )
    (tmp_path / "trainer.yaml").write_text(config_text(of))
    trainer = stage.start("trainer", "trainer", "train", "--config", str(tmp_path / "trainer.yaml"))
    waiting = stage.answered(8, LEAVER, opd=Source.USER, opd_window_ms=600_000)
    eventually(lambda: stage.left(CHANGELOG), 30, 0.2, "the open task's half is not on the changelog")
    assert trainer.wait(120) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    assert stage.left(topics.ROLLOUTS) == {"task-5/0", "task-7/0"}

    _, dry = stage.command("forget", "--session", LEAVER, "--dry-run")
    assert (dry["complete"], dry["husks"]) == (False, 0)
    counts = {row["topic"].removeprefix("tentalis."): row["records"] for row in dry["topics"]}
    assert counts["rollouts.v1"] == 2 and counts["tasks.v1"] == counts["results.v1"] == 3
    assert stage.left(topics.ROLLOUTS) and stage.left(CHANGELOG)

    code, report = stage.command("forget", "--session", LEAVER, "--yes")
    assert (code, report["complete"], report["husks"], report["waiting"]) == (0, True, 2, {}), report
    stage.publisher.send(topics.HALVES, hint(sample_of(waiting), at=waiting.opened_at))  # under way all the while
    stage.publisher.flush()
    late = f"task-8/0/late/{hint(sample_of(waiting)).hint_id}"
    eventually(lambda: {"task-8/0", late} <= set(stage.newest(topics.OUTCOMES)), 30, 0.2)
    assert not stage.left(topics.ROLLOUTS)
    assert {key for key in stage.left(CHANGELOG) if not str(key).startswith("forget/")} == set()
    assert {"task-5/0", "task-7/0"} <= set(stage.newest(topics.ROLLOUTS)) and len(stage.newest(topics.ROLLOUTS)) == 8

    code, again = stage.command("forget", "--session", LEAVER, "--yes")
    assert (code, again["complete"], again["husks"]) == (0, True, 0), again
    code, verified = stage.command("verify", RUN)
    assert code == 0, verified["problems"]

    with pytest.raises(BadRollouts) as refused:
        replay(RUN, stage.settings)
    named = sorted((problem.kind, problem.rollout_id) for problem in refused.value.problems)
    assert named == [("forgotten", "task-5/0"), ("forgotten", "task-7/0")]
    codec = make_codec(stage.settings)
    planned = [row for plan in read_run(stage.settings, codec, RUN).plans.values() for row in plan.rows]
    lying = look_up_rollouts(stage.settings, codec, planned)
    assert {key for key, rollout in lying.items() if rollout.forgotten} == {"task-5/0", "task-7/0"}
    code, replayed = stage.replayed("--allow-missing", timeout=120)
    assert (code, replayed["equal"], len(replayed["left_out"])) == (0, None, 2), replayed
    assert [step["equal"] for step in replayed["steps"]] == [True, True, None]
