"""An erasure: the person that a request names, the redacted rollout, and the work that remains."""

from contextlib import nullcontext
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import (
    Feedback,
    Forget,
    Open,
    Outcome,
    OutcomeKind,
    Provenance,
    Result,
    Rollout,
    Sampling,
    SessionEvent,
    Source,
    Status,
    Task,
    TokenSpan,
)
from schemas.tensors import float32_bytes
from schemas.wire.codec import Codec
from tentalis.cli.main import app
from tentalis.kafka.topology import topic_table
from tentalis.ops.forget import ForgetReport
from tentalis.ops.forget.core import Census, NoSuchRequest, Sweep, compacted_by, gone_at, redacted_rollout, request_of
from tentalis.ops.forget.process import Row, personal_changelogs
from tentalis.service.settings import Settings
from tests.support.trainer_lab import rollout

MARK = "zanzibar"
TOKENS = [31337, 31338, 31339]


def full(task_id: str = "t", **more: Any) -> Rollout:
    """A rollout with something in every field."""
    made = rollout(task_id, response=TOKENS, teacher=[-1.5, -2.5, -3.5], reward=0.625, rewards=[0.625, 0.5], n=2)
    head = made.head.model_copy(update={"session_id": f"s-{MARK}", "user_id": f"u-{MARK}", "turn_index": 7})
    place = Provenance(half="score", half_id="h", topic=topics.HALVES, partition=1, offset=4)
    fields: dict[str, Any] = {
        "head": head,
        "worker_id": "worker",
        "components": {MARK: 0.625},
        "hints": (f"mention {MARK}",),
        "teacher_policy": "base",
        "sampling": Sampling(stop=(MARK,), temperature=0.875),
        "step_scores": float32_bytes([0.625]),
        "step_spans": (TokenSpan(start=4, end=7),),
        "provenance": (place,),
    }
    return made.model_copy(update=fields | more)


def test_a_redacted_rollout_says_that_it_was_there_and_nothing_else() -> None:
    whole = full()
    left = redacted_rollout(whole)
    assert (left.rollout_id, left.digest, left.forgotten) == (whole.rollout_id, whole.digest, True)
    assert (left.head.task_id, left.provenance, digest_holds(left)) == ("t", whole.provenance, True)
    encoded = Codec().encode(topics.ROLLOUTS, left)
    for trace in (MARK.encode(), *(whole.token_ids[i : i + 4] for i in range(16, 28, 4)), float32_bytes([-1.5])):
        assert trace in Codec().encode(topics.ROLLOUTS, whole)
        assert trace not in encoded


def test_every_field_of_a_rollout_is_kept_on_purpose_or_empty_in_its_redacted_rollout() -> None:
    """A field that is added to the record is content until it is listed here and in `redacted_rollout`."""
    kept = {
        *("rollout_id", "rollout_event_id", "event_time", "head", "sample_index", "result_id", "worker_id"),
        *("n_requested", "provenance", "digest", "forgotten"),
    }
    left = redacted_rollout(full())
    for name, field in Rollout.model_fields.items():
        assert name in kept or getattr(left, name) == field.default, name
    assert {name for name in type(left.head).model_fields if getattr(left.head, name) in (None, "")} >= {
        "session_id",
        "user_id",
        "turn_index",
    }


@pytest.mark.parametrize(
    ("criteria", "meant"),
    [
        ({"session_id": "s"}, True),
        ({"session_id": "s", "user_id": "u"}, True),
        ({"session_id": "s", "user_id": "another"}, False),
        ({"user_id": "u", "before": 100}, False),
        ({"user_id": "u", "before": 101}, True),
        ({"before": 101}, True),
        ({"before": 101, "policy": "tiny"}, True),
        ({"before": 101, "policy": "another"}, False),
        ({"policy": "tiny"}, False),
        ({}, False),
    ],
)
def test_everything_that_is_given_must_hold(criteria: dict[str, Any], meant: bool) -> None:
    head = rollout().head.model_copy(update={"session_id": "s", "user_id": "u"})
    assert Forget(forget_id="f", event_time=0, **criteria).concerns(head, 100) is meant


def test_a_request_that_names_nobody_is_refused() -> None:
    for refused in ((None, None, None, "tiny"), ("", None, None, None), (None, "u", 11, None)):
        with pytest.raises(NoSuchRequest):
            request_of(*refused, now=10)
    assert request_of(None, "u", 10, None, now=10).before == 10


def test_a_sweep_owes_a_redacted_rollout_for_content_that_no_redacted_rollout_follows() -> None:
    mine = full("t1")
    sweep = Sweep(Forget(forget_id="f", event_time=0, user_id=mine.head.user_id))
    sweep.take(1, mine)
    sweep.take(1, rollout("t2"))
    assert set(sweep.owed) == {(1, "t1/0")} == {(1, key) for key in sweep.matched}
    sweep.take(1, redacted_rollout(mine))
    assert not sweep.owed
    sweep.take(1, mine)  # a worker that was killed writes its output once more
    assert sweep.owed == {(1, "t1/0"): redacted_rollout(mine)}
    sweep.take(1, mine.model_copy(update={"digest": "forged"}))
    assert sweep.owed[1, "t1/0"].digest == mine.digest


def test_a_sweep_for_one_policy_takes_the_copies_with_other_rewards_too() -> None:
    mine = full("t1")

    def swept(policy: str, named: str) -> int:
        sweep = Sweep(Forget(forget_id="f", event_time=0, user_id=mine.head.user_id, policy=named))
        sweep.take(0, mine.model_copy(update={"head": mine.head.model_copy(update={"policy": policy})}))
        return len(sweep.owed)

    copy = "assistant.cf-0123abcd"
    assert swept("assistant", "assistant") == swept(copy, "assistant") == swept(copy, copy) == 1
    assert swept(f"{copy}.cf-89abcdef", "assistant") == 1
    assert swept("assistant", copy) == swept("assistant.cf-mine", "assistant") == swept(copy, "other") == 0


def test_a_census_finds_what_names_no_more_than_the_task() -> None:
    task = Task(
        task_id="a/b",
        event_time=1,
        policy="tiny",
        environment="chat",
        messages=({"role": "user", "content": "x"},),
        session_id="s",
        user_id="u",
    )
    result = Result(
        result_id="r", event_time=1, opened_at=50, task=task, sample_index=0, worker_id="w", status=Status.OK
    )
    bare = {"event_time": 1, "source": Source.USER}
    census = Census(Forget(forget_id="f", event_time=0, user_id="u", before=60))
    census.take(topics.TASKS, task, 50)
    census.take(topics.TASKS, task.model_copy(update={"task_id": "later"}), 60)
    census.take(topics.TASKS, task.model_copy(update={"task_id": "c", "user_id": "another"}), 50)
    census.take(topics.RESULTS, result, 70)
    census.take(topics.FEEDBACK, Feedback(feedback_id="1", task_id="a/b", **bare), 80)
    census.take(topics.FEEDBACK, Feedback(feedback_id="2", task_id="c", **bare), 80)
    census.take(topics.HALVES, Open(open_id="o", event_time=1, opened_at=50, head=task.head), 51)
    outcome = Outcome(
        outcome_id="o", outcome_key="a/b/0", event_time=59, kind=OutcomeKind.RL, head=task.head, sample_index=0
    )
    census.take(topics.OUTCOMES, outcome, 59)
    for session_id, user_id, at in (("s", None, 59), ("s", None, 60), ("t", None, 59), ("t", "u", 58), ("t", "v", 59)):
        event = SessionEvent(session_event_id="e", event_time=at, session_id=session_id, user_id=user_id)
        census.take(topics.SESSIONS, event, at)
    for key in ("a/b", "a/b/0/late/x", "a", "c", None):
        census.letter(topics.dlq(topics.HALVES), key, 90)
    found = {topic.removeprefix("tentalis."): (c.records, c.newest) for topic, c in census.counts.items()}
    assert found == {
        "tasks.v1": (1, 50),
        "results.v1": (1, 70),
        "feedback.v1": (1, 80),
        "halves.v1": (1, 51),
        "outcomes.v1": (1, 59),
        "sessions.v1": (2, 59),
        "halves.v1.dlq": (2, 90),
    }


def test_when_the_bytes_are_gone() -> None:
    assert gone_at(1000, {"cleanup.policy": "delete", "retention.ms": "50", "segment.ms": "7"}) == 1057
    assert gone_at(1000, {"cleanup.policy": "compact", "retention.ms": "50"}) is None
    assert gone_at(1000, {"cleanup.policy": "delete", "retention.ms": "-1"}) is None
    assert compacted_by(1000, {"max.compaction.lag.ms": "50"}) == 1050
    assert compacted_by(1000, {"max.compaction.lag.ms": str(2**63 - 1)}) is None
    table = topic_table()
    promised = [topics.ROLLOUTS, *personal_changelogs()]
    assert all(compacted_by(0, table[name].config) is not None for name in promised)


@pytest.mark.parametrize("records", [0, 2])
def test_a_session_that_the_log_does_not_know_is_said_to_be_none(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives a client's own name of it would believe that it is forgotten."""
    report = ForgetReport(request_of("s1", None, None, None, now=1), False, [Row("t", records, "left", None)])
    monkeypatch.setattr("tentalis.cli.forget.reached", lambda bootstrap: nullcontext(Settings()))
    monkeypatch.setattr("tentalis.ops.forget.forget", lambda *_, **__: report)
    done = CliRunner().invoke(app, ["forget", "--session", "s1", "--yes"])
    assert done.exit_code == 0 and ("USER/s1" in done.stderr) is (records == 0), done.stderr
