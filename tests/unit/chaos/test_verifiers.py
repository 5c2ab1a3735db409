"""The verifiers of the chaos run find what was tampered with, and nothing in what the applications really write."""

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from schemas import topics
from schemas.digest import with_digest
from schemas.records import (
    LogprobsMode,
    MetaSignal,
    Outcome,
    OutcomeKind,
    Polarity,
    Record,
    Rollout,
    Sampling,
    TokenSpan,
)
from schemas.tensors import float32_bytes, int32_bytes
from streams.apps.aggregation.processor import Aggregation
from streams.apps.join.core import JoinLimits
from streams.runtime.decoding import dead
from streams.runtime.dlq import letter
from streams.runtime.processor import LogRecord
from tentalis.kafka.consumer import Stored
from tentalis.ops.forget.core import redacted_rollout
from tests.chaos import aggregates, brute_force
from tests.chaos.findings import Findings
from tests.chaos.promises import not_forgotten, wrongly_dead
from tests.support.join_support import (
    CODEC,
    START,
    Written,
    fold,
    forget,
    head,
    hint,
    log_of,
    open_,
    sample,
    score,
    tick,
)
from tests.support.stream_records import make_feedback, make_result, make_task, on_log
from tests.unit.streams.apps.test_aggregation import MINUTE, T0, outcome

Timed = tuple[int, Record | bytes]
NOTHING = Findings()


def on_topic(record: LogRecord) -> Stored:
    return Stored(record.topic, record.partition, record.offset, record.timestamp, record.key, record.value, ())


def stored(topic: str, *records: Record) -> list[Stored]:
    return [
        Stored(topic, 0, offset, START, record.key, CODEC.encode(topic, record), ())
        for offset, record in enumerate(records)
    ]


def test_the_verifiers_share_no_code_with_the_applications() -> None:
    modules = "tests.chaos.brute_force, tests.chaos.aggregates, tests.chaos.promises, tentalis.ops.verify"
    text = f"import sys, {modules}; print(*(m for m in sys.modules if m.startswith(('streams', 'tentalis.rewards'))))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# --- the join ---------------------------------------------------------------------------------------------------------


def written(halves: Sequence[Timed]) -> list[Stored]:
    """Returns the join's output for a log."""
    produced = fold(*halves, limits=JoinLimits()).produced
    return [Stored(topic, 3, n, START, key, value, ()) for n, (topic, key, value) in enumerate(produced)]


def joined(halves: Sequence[Timed], said: Iterable[Stored]) -> Findings:
    return brute_force.differences([on_topic(record) for record in log_of(*halves)], said, CODEC)[0]


PLAIN: list[Timed] = [(10, open_(head())), (20, score(sample(head()), 0.5)), (30, hint(sample(head()))), (40, b"?")]
LEFT: list[Timed] = [
    (10, open_(head())),
    (20, score(sample(head()), 0.5)),
    (25, forget(session_id="session-t1")),
    (30, hint(sample(head()))),
    (40, open_(head("t2"))),
    (50, score(sample(head("t2")), 0.5)),
    (60, hint(sample(head("t2")))),
]


@pytest.mark.parametrize("halves", [PLAIN, LEFT])
def test_nothing_is_found_in_what_the_join_writes(halves: list[Timed]) -> None:
    said = written(halves)
    assert joined(halves, said) == NOTHING
    assert joined(halves, said + said) == NOTHING, "a worker that was killed before its commit writes once more"


def test_what_the_join_did_not_write_is_missed() -> None:
    for gone in range(2):
        said = written(PLAIN)
        missing = said.pop(gone)
        assert joined(PLAIN, said).lost == [f"{missing.topic}: {missing.key}"]


def test_another_reward_is_found_under_its_own_digest_too() -> None:
    said = written(PLAIN)
    other = written([(10, open_(head())), (20, score(sample(head()), 0.6)), (30, hint(sample(head()))), (40, b"?")])
    assert len(joined(PLAIN, other).wrong) == 2
    assert len(joined(PLAIN, said + other).doubled) == 2


STEPS = {
    "step_scores": float32_bytes([0.5, -1.0]),
    "step_spans": (TokenSpan(start=1, end=2), TokenSpan(start=2, end=4)),
}


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (Rollout, {"step_scores": float32_bytes([0.5, 1.0])}),
        (Rollout, {"step_spans": (TokenSpan(start=1, end=3), TokenSpan(start=3, end=4))}),
        (Rollout, {"n_rewarded": 1}),
        (Rollout, {"n_requested": 2}),
        (Rollout, {"loss_mask": bytes(4)}),
        (Rollout, {"sampler_logprobs": float32_bytes([0, -1, -1, -1])}),
        (Rollout, {"logprobs_mode": LogprobsMode.NONE}),
        (Rollout, {"sampling": Sampling(temperature=0.0)}),
        (Rollout, {"policy_spans": ()}),
        (Rollout, {"components": {"plain": 0.25}}),
        (Rollout, {"teacher_policy": "another"}),
        (Rollout, {"topk": 1, "topk_ids": int32_bytes([1] * 4), "topk_logprobs": float32_bytes([-1] * 4)}),
        (Outcome, {"components": {"plain": 0.25}}),
        (Outcome, {"not_trainable": "greedy sampling"}),
        (Outcome, {"rollout_digest": "another"}),
        (Outcome, {"worker_id": "another"}),
        (Outcome, {"policy_spans": ()}),
        (Outcome, {"head": head("t1", opd=None)}),
    ],
)
def test_every_field_of_an_outcome_or_rollout_is_compared_with_the_halves(
    of: type[Record], changes: dict[str, Any]
) -> None:
    halves: list[Timed] = [PLAIN[0], (20, score(sample(head()), 0.5).model_copy(update=STEPS)), *PLAIN[2:]]
    said = written(halves)
    assert joined(halves, said) == NOTHING
    (place,) = (n for n, each in enumerate(said) if isinstance(each.decode(CODEC), of))
    other = said[place].decode(CODEC).model_copy(update=changes)
    value = CODEC.encode(said[place].topic, with_digest(other) if isinstance(other, Rollout) else other)
    said[place] = replace(said[place], value=value)
    (wrong,) = joined(halves, said).wrong
    assert all(f"{name} " in wrong for name in changes), wrong


def test_a_request_to_forget_that_the_join_did_not_heed_is_found() -> None:
    heedless = written([*LEFT[:2], (25, tick()), *LEFT[3:]])
    found = joined(LEFT, heedless)
    # It should have closed the task without its half, and counted the hint that came after as late.
    assert found.lost == [f"{topics.OUTCOMES}: t1/0/late/{hint(sample(head())).hint_id}"]
    assert [line.split(": ")[1] for line in found.wrong] == ["t1/0", "t1/0"]


def test_a_request_about_what_was_before_is_held_to_its_time() -> None:
    session = forget(session_id="session-t1", before=START + 5)
    asked: list[Timed] = [*LEFT[:2], (25, session), *LEFT[3:]]
    task_of_later = head().model_copy(update={"task_id": "t9"})
    later: list[Timed] = [
        (70, open_(task_of_later, START + 70)),
        (80, score(sample(task_of_later), 1.0, at=START + 70)),
    ]
    later += [(90, hint(sample(task_of_later), at=START + 70))]
    assert joined(asked + later, written(asked + later)) == NOTHING
    heedful: list[Timed] = [*LEFT, *later]  # as if the whole session had been asked for
    assert f"{topics.ROLLOUTS}: t9/0" in joined(asked + later, written(heedful)).lost


# --- who has left -----------------------------------------------------------------------------------------------------


def rollouts() -> list[Rollout]:
    """Of user-t1 and user-t2."""
    made: Written = fold(
        *(half for n in (1, 2) for half in ((n, score(sample(head(f"t{n}")), 0.5)), (n + 9, tick()))), (5_000, tick())
    )
    return [made.rollouts["t1/0"], made.rollouts["t2/0"]]


def left(*said: Rollout) -> list[str]:
    return not_forgotten(stored(topics.ROLLOUTS, *said), "user-t1", CODEC)[0].wrong


def test_of_a_forgotten_user_only_redacted_rollouts_may_remain() -> None:
    mine, other = rollouts()
    assert left(mine, other, redacted_rollout(mine)) == []
    assert left(mine, mine, redacted_rollout(mine), other, redacted_rollout(mine)) == []
    assert not_forgotten(stored(topics.ROLLOUTS, mine, redacted_rollout(mine)), "user-t1", CODEC)[1] == 1


def test_data_left_of_a_forgotten_user_is_found() -> None:
    mine, other = rollouts()
    assert left(mine, other) == ["t1/0: not redacted, although its user was forgotten"]
    assert left(mine, redacted_rollout(mine), mine) == ["t1/0: not redacted, although its user was forgotten"]
    assert left(mine, redacted_rollout(mine), other, redacted_rollout(other)) == ["t2/0: redacted without a request"]
    assert left(mine, redacted_rollout(mine).model_copy(update={"digest": other.digest})) == [
        "t1/0: redacted with the digest of another rollout"
    ]
    for content in ({"reward": 0.5}, {"hints": ("Be brief.",)}, {"head": mine.head}, {"token_ids": mine.token_ids}):
        spoken = redacted_rollout(mine).model_copy(update=content)
        assert left(mine, spoken) == ["t1/0: redacted, but with content"], content


# --- dead letters -----------------------------------------------------------------------------------------------------

GARBAGE = b"no record of anybody"


def dead_letter(record: LogRecord) -> Stored:
    refused = dead(record, ValueError("no such verifier"))
    sent = letter(refused, group="tentalis-scoring", attempts=1, version="1", failed_at=0.0)
    headers = tuple((name, value or b"") for name, value in sent.headers)
    return Stored(sent.topic, record.partition, 0, START, record.key, sent.value, headers)


def test_only_what_was_meant_to_be_no_record_is_excused_among_the_dead_letters() -> None:
    garbage = LogRecord(topics.HALVES, 3, 1, START, "t1", GARBAGE)
    assert wrongly_dead([dead_letter(garbage), dead_letter(garbage)], {GARBAGE}) == NOTHING
    assert wrongly_dead([dead_letter(garbage)], {b"other bytes"}).wrong
    for topic, record in (
        (topics.TASKS, make_task()),
        (topics.RESULTS, make_result()),
        (topics.FEEDBACK, make_feedback()),
        (topics.HALVES, score(sample(head()))),
    ):
        found = wrongly_dead([dead_letter(garbage), dead_letter(on_log(topic, record))], {GARBAGE})
        (line,) = found.wrong
        assert line.startswith(f"{topics.dlq(topic)}: a valid record with key t1 was dead-lettered by tentalis-scoring")


# --- aggregation ------------------------------------------------------------------------------------------------------


def inputs() -> list[LogRecord]:
    """Two windows, of which the first gets more when the second has begun; one outcome lies there twice."""
    outcomes = [
        outcome(0, 0.25),
        outcome(1, 1.0),
        outcome(2, -1.0, T0 + MINUTE),
        outcome(3, 0.5, T0 + 100),
        outcome(1, 1.0),
        outcome(4, 0.75, T0 + 200, kind=OutcomeKind.LATE),
        outcome(5, None, T0 + 300, kind=OutcomeKind.EXPIRED),
    ]
    grades: list[dict[str, Any]] = [{"score": 0.25}, {"polarity": Polarity.POSITIVE}, {}, {"score": 1.0}]
    said = [
        make_feedback(make_result(make_task(f"t{n}")), feedback_id=f"f{n}", event_time=T0 + n, **fields)
        for n, fields in enumerate(grades)
    ]
    log = [on_log(topics.OUTCOMES, record, n, T0 + 2 * MINUTE + n) for n, record in enumerate(outcomes)]
    return log + [on_log(topics.FEEDBACK, record, n, T0 + 2 * MINUTE + n) for n, record in enumerate(said)]


def signals() -> list[MetaSignal]:
    """Returns the application's output, record by record."""
    application = Aggregation(CODEC)
    application.restore(3, {})
    found: list[MetaSignal] = []
    for record in inputs():
        for output in asyncio.run(application.process(3, [record])).outputs:
            meta = CODEC.decode(output.value, topic=topics.META, partition=0, offset=0)
            assert isinstance(meta, MetaSignal)
            found.append(meta)
    return found


def summed(*said: MetaSignal) -> Findings:
    return aggregates.differences(map(on_topic, inputs()), stored(topics.META, *said), CODEC)[0]


def test_nothing_is_found_in_what_aggregation_writes() -> None:
    assert summed(*signals()) == NOTHING
    totals = aggregates.folded(map(on_topic, inputs()), CODEC)
    assert (len(totals.buckets), totals.corrected) == (3, 3)


def test_a_window_that_was_not_corrected_when_something_came_late_is_found() -> None:
    said = signals()
    late = [n for n, signal in enumerate(said) if signal.window_start == T0 and signal.outcomes]
    for last in late[:-1]:
        assert summed(*said[: last + 1], *(signal for signal in said if signal.window_start != T0)).wrong
    assert summed(*said, said[late[-2]]).wrong, "the last word counts"


@pytest.mark.parametrize(
    "tampered",
    [
        {"count": 4},
        {"mean_reward": 0.25},
        {"mean_reward": None},
        {"reward_variance": 0.1},
        {"feedback_count": 2},
        {"mean_feedback_score": 0.7},
        {"feedback_variance": None},
        {"outcomes": {"rl": 3}},
        {"window_ms": 2 * MINUTE},
    ],
)
def test_a_number_that_the_inputs_do_not_add_up_to_is_found(tampered: dict[str, Any]) -> None:
    said, (field,) = signals(), tampered
    last = [signal for signal in said if signal.window_start == T0 and bool(signal.outcomes) != ("feedback" in field)][
        -1
    ]
    (found,) = summed(*said, last.model_copy(update=tampered)).wrong
    assert field in found


def test_windows_that_are_missing_or_made_up_are_found() -> None:
    said = signals()
    assert summed(*(signal for signal in said if signal.window_start == T0)).lost
    assert summed(*said, said[-1].model_copy(update={"worker_id": "nobody"})).wrong
