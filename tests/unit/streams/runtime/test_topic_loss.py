"""A refusal says in numbers what a lost topic takes along, and says so if they are not known."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schemas import topics
from streams.apps.join.core import JoinLimits
from streams.apps.join.processor import JoinProcessor
from streams.runtime import topic_loss
from streams.runtime.processor import Processor
from streams.runtime.topic_loss import TopicLoss
from tentalis.kafka.identity import CommittedOffset, LossKind, PartitionLoss
from tentalis.service.settings import Settings
from tests.support.join_support import CODEC, PARTITION, drive, head, log_of, open_

CHANGELOG = "tentalis-app-state-changelog"
OPEN = 5
NOT_COUNTED = "could not be counted"


@pytest.fixture(autouse=True)
def _no_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_loss, "read_to_end", lambda *_: iter(()))


def loss_of(topic: str, kind: LossKind) -> PartitionLoss:
    return PartitionLoss(topic, PARTITION, kind, "the proof", OPEN, of_state=topic == CHANGELOG)


def said(processor: Any, losses: Sequence[PartitionLoss], left: Mapping[int, Mapping[str, bytes]]) -> str:
    app = cast(Processor, processor)
    return TopicLoss(Settings(), app, CHANGELOG, losses, {}, left, lambda: None).described()


def join_state() -> dict[str, bytes]:
    """The state of a join with open tasks of two samples each."""
    processor = JoinProcessor(CODEC, JoinLimits())
    processor.restore(PARTITION, {})
    log = log_of(*((n, open_(head(f"task-{n}", 2, deadline_ms=60_000))) for n in range(OPEN)))
    changes = [each for wave in drive(processor.process(PARTITION, log)).changes for each in wave]
    return {key: value for key, value in changes if value is not None}


def test_the_samples_of_open_tasks_are_counted_from_the_state_that_is_left() -> None:
    losses = [loss_of(topics.HALVES, LossKind.RECREATED)]
    text = said(JoinProcessor(CODEC, JoinLimits()), losses, {PARTITION: join_state()})
    assert f"{2 * OPEN} samples of open tasks would get no outcome" in text


@pytest.mark.parametrize(
    "lost", [(topics.HALVES,), (topics.HALVES, CHANGELOG)], ids=["state-not-read-yet", "state-and-input"]
)
def test_what_cannot_be_counted_is_not_said_to_be_zero(lost: tuple[str, ...]) -> None:
    text = said(JoinProcessor(CODEC, JoinLimits()), [loss_of(each, LossKind.CUT) for each in lost], {})
    assert NOT_COUNTED in text and "samples" not in text


def unread(topic: str) -> PartitionLoss:
    return PartitionLoss(topic, PARTITION, LossKind.UNREAD, "the proof", OPEN, begin=OPEN + 3)


def loss_with(losses: Sequence[PartitionLoss], committed: Mapping[tuple[str, int], CommittedOffset]) -> TopicLoss:
    join = cast(Processor, JoinProcessor(CODEC, JoinLimits()))
    return TopicLoss(Settings(), join, CHANGELOG, losses, committed, {PARTITION: join_state()}, lambda: None)


def test_unread_records_that_are_gone_are_passed_over_and_the_state_stays() -> None:
    here, other = (topics.HALVES, PARTITION), (topics.HALVES, PARTITION + 1)
    loss = loss_with([unread(topics.HALVES)], {here: CommittedOffset(3), other: CommittedOffset(9)})
    assert loss.described().endswith(f"The unread records of {topics.HALVES} would be passed over")
    assert loss.keeps_state(PARTITION)
    given_up = loss.give_up(PARTITION)
    assert (given_up.outputs, given_up.changes) == ([], []) and len(given_up.audit) == 1
    assert loss.offsets() == {here: OPEN + 3}, "where the log begins; other partitions keep their place"
    assert loss_with([unread(topics.HALVES)], {}).offsets() == {here: OPEN + 3}, "also without a committed offset"


def test_a_lost_state_is_not_kept_because_records_are_unread_too() -> None:
    here = (topics.HALVES, PARTITION)
    loss = loss_with([unread(topics.HALVES), loss_of(CHANGELOG, LossKind.RECREATED)], {here: CommittedOffset(3)})
    assert not loss.keeps_state(PARTITION) and NOT_COUNTED in loss.described()
    assert loss.offsets() == {here: OPEN + 3}


def test_other_applications_lose_their_entries() -> None:
    sessions = SimpleNamespace(topics=(topics.SESSIONS,))
    entries = {PARTITION: {"a": b"1", "b": b"2"}}
    assert "2 entries" in said(sessions, [loss_of(topics.SESSIONS, LossKind.RECREATED)], entries)
    assert NOT_COUNTED in said(sessions, [loss_of(CHANGELOG, LossKind.RECREATED)], {PARTITION: {}})
