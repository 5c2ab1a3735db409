"""Records of a lost topic are given up once an operator has accepted the loss, and are lost before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Drop, OutcomeKind, Source, Terms
from tentalis.kafka.identity import LossKind, PartitionLoss
from tentalis.kafka.loss_audit import ADMIN, AcceptedLoss, accepted_loss, loss_audit
from tentalis.kafka.moved_topics import MOVED
from tentalis.ops.verify import Log, check
from tentalis.ops.verify.losses import JOIN
from tentalis.ops.verify.reader import placed_anew
from tests.support.verify_run import PARTITION, T0, Writer, altered, consistent, repeated, signed

LATER = T0 + 1_000_000
TRAINER = "tentalis-trainer"
ROLLOUTS_LOST = AcceptedLoss(topics.ROLLOUTS, PARTITION, TRAINER, LATER)
HALVES_LOST = AcceptedLoss(topics.HALVES, PARTITION, JOIN, LATER)


def rules(log: Log) -> set[str]:
    return {problem.rule for problem in check(log).problems}


def without_rollouts() -> Log:
    log = consistent()
    log.rollouts.clear()
    return log


def without_halves() -> Log:
    log = consistent()
    for records in (log.opens, log.scores, log.hints):
        records.clear()
    return log


@pytest.mark.parametrize("partition", [PARTITION, None])
def test_rollouts_of_an_accepted_loss_are_given_up(partition: int | None) -> None:
    log = without_rollouts()
    assert {"missing-rollout", "half-unaccounted"} <= rules(log)
    log.losses = [replace(ROLLOUTS_LOST, partition=partition)]
    report = check(log)
    assert report.problems == []
    assert (report.numbers["rollouts_given_up"], report.numbers["rollouts"]) == (5, 0)
    log.losses = []
    assert check(log).numbers["rollouts_given_up"] == 0


@pytest.mark.parametrize(
    "loss",
    [
        replace(ROLLOUTS_LOST, partition=PARTITION + 1),
        replace(ROLLOUTS_LOST, topic=topics.RESULTS),
        replace(ROLLOUTS_LOST, at=T0 - 1),
    ],
    ids=["another-partition", "another-topic", "before-they-were-written"],
)
def test_another_loss_gives_no_rollout_up(loss: AcceptedLoss) -> None:
    log = without_rollouts()
    before = check(log)
    log.losses = [loss]
    after = check(log)
    assert after.problems == before.problems and after.numbers["rollouts_given_up"] == 0


def test_a_rollout_that_is_planned_after_the_loss_must_be_there() -> None:
    log = without_rollouts()
    log.losses = [ROLLOUTS_LOST]
    altered(log.plans, 2, event_time=LATER + 1)
    altered(log.outcomes, 3, event_time=LATER + 1)  # of the rollout in that plan
    found = [(problem.rule, problem.where.split()[-1]) for problem in check(log).problems]
    planned = log.plans[2].record.rows[0].rollout_id
    assert ("missing-rollout", planned) in found and {where for _, where in found} - {planned} <= {
        half.record.score_id for half in log.scores
    }


def test_a_log_that_was_cut_off_has_lost_its_end_alone() -> None:
    log = consistent()
    gone = {seen.record.rollout_id: seen.offset for seen in log.rollouts if seen.offset < 2}
    log.rollouts[:] = [seen for seen in log.rollouts if seen.offset >= 2]
    log.outcomes[:] = [seen for seen in log.outcomes if seen.record.rollout_id not in gone]
    log.losses = [replace(ROLLOUTS_LOST, first=2)]
    assert "missing-rollout" in rules(log)
    log.losses = [ROLLOUTS_LOST]
    assert "missing-rollout" not in rules(log)
    # Of records that were removed before they were read, those before the log's beginning are lost, and no others.
    log.losses = [replace(ROLLOUTS_LOST, end=2)]
    assert "missing-rollout" not in rules(log)
    log.losses = [replace(ROLLOUTS_LOST, end=1)]
    assert "missing-rollout" in rules(log)


def moved_to_the_beginning(log: Log) -> None:
    """The last rollout, which no step has reached, is now the only one, at the first offset."""
    last = replace(log.rollouts[-1], offset=0)
    log.rollouts[:] = [last]


def test_the_offsets_of_a_lost_topic_are_not_those_of_the_new_one() -> None:
    log = consistent()
    moved_to_the_beginning(log)
    assert "untrained-rollout" in rules(log)
    log.losses = [ROLLOUTS_LOST]
    report = check(log)
    assert report.problems == [] and report.numbers["ahead"] == 1


def test_a_drop_of_the_lost_topic_covers_nothing_on_the_new_one() -> None:
    log = consistent()
    moved_to_the_beginning(log)
    drop = Drop(partition=PARTITION, first_offset=0, last_offset=0, count=1, reason="stale")
    altered(log.plans, 2, drops=(drop,))
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)
    assert check(log).numbers["dropped"] == 1
    log.losses = [ROLLOUTS_LOST]
    numbers = check(log).numbers
    assert (numbers["dropped"], numbers["ahead"]) == (0, 1)


def test_what_a_step_after_the_loss_passed_over_is_lost() -> None:
    log = consistent()
    moved_to_the_beginning(log)
    log.losses = [ROLLOUTS_LOST]
    altered(log.plans, 2, event_time=LATER + 1)
    assert "untrained-rollout" in rules(log)


def test_a_rollout_that_was_imported_has_another_place() -> None:
    log = consistent()
    for index, row in enumerate(log.rollouts):
        log.rollouts[index] = replace(row, offset=row.offset - 10)
    assert "plan-row" in rules(log)
    log.losses = [ROLLOUTS_LOST]
    assert rules(log) == set()


def test_halves_of_an_accepted_loss_are_no_problem() -> None:
    log = without_halves()
    assert {
        "missing-open",
        "unscored-result",
        "feedback-unanswered",
        "mixed-rollout",
        "outcome-reward",
        "stray-outcome",
    } <= rules(log)
    log.losses = [HALVES_LOST]
    report = check(log)
    assert report.problems == [] and report.numbers["given_up"] == 0


@pytest.mark.parametrize(
    "loss",
    [
        replace(HALVES_LOST, partition=PARTITION + 1),
        replace(HALVES_LOST, component=ADMIN, partition=None),
        replace(HALVES_LOST, topic=topics.changelog(JOIN, "state")),
        replace(HALVES_LOST, at=T0),
    ],
    ids=["another-partition", "not-the-join", "the-state-alone", "before-they-were-written"],
)
def test_another_loss_gives_no_half_up(loss: AcceptedLoss) -> None:
    log = without_halves()
    before = check(log).problems
    log.losses = [loss]
    assert check(log).problems == before


def with_open_task(**terms: Any) -> tuple[Writer, Log]:
    """A task of two samples that was open when its halves were lost."""
    writer = Writer()
    writer.log = without_halves()
    writer.offsets = {topics.TASKS: 100, topics.HALVES: 100, topics.FEEDBACK: 100, topics.RESULTS: 100}
    writer.clock += 10_000
    task = writer.task("open", 2, Terms(**terms))
    if task.terms.opens.value != "at_once":
        writer.feedback(writer.result(task, 0, [5]), "No.")
    writer.log.opens.clear()
    writer.log.clock[PARTITION] = T0 + 10 * task.terms.deadline_ms
    return writer, writer.log


@pytest.mark.parametrize("terms", [{}, {"rl": Source.USER, "opens": "first_feedback"}], ids=["at-once", "feedback"])
def test_open_tasks_of_an_accepted_loss_are_given_up(terms: dict[str, Any]) -> None:
    _, log = with_open_task(**terms)
    lost = {"missing-outcome"} if not terms else {"feedback-unanswered"}
    assert lost <= rules(log)
    log.losses = [HALVES_LOST]
    report = check(log)
    assert report.problems == [] and report.numbers["given_up"] == 2


def test_a_task_with_a_half_after_the_loss_is_known_to_the_join() -> None:
    writer, log = with_open_task()
    log.losses = [HALVES_LOST]
    writer.score(writer.result(log.tasks[-1].record, 0, [5]), 1.0)
    log.clock[PARTITION] = T0 + 10 * log.tasks[-1].record.terms.deadline_ms
    report = check(log)
    assert {problem.rule for problem in report.problems} == {"missing-outcome"}
    assert report.numbers["given_up"] == 0


def after(change: Callable[[Log], None]) -> set[str]:
    """The rules that a change breaks after an accepted loss of the halves."""
    log = without_halves()
    log.losses = [HALVES_LOST]
    change(log)
    return rules(log)


def test_halves_that_are_due_after_the_loss_must_be_there() -> None:
    def task(log: Log) -> None:
        repeated(log.tasks, 0, task_id="new")
        log.tasks[-1] = replace(log.tasks[-1], timestamp=LATER)

    def result(log: Log) -> None:
        log.results[0] = replace(log.results[0], timestamp=LATER)

    def feedback(log: Log) -> None:
        log.feedback[0] = replace(log.feedback[0], timestamp=LATER)

    def late(log: Log) -> None:
        index = next(i for i, seen in enumerate(log.outcomes) if seen.record.kind is OutcomeKind.LATE)
        log.outcomes[index] = replace(log.outcomes[index], timestamp=LATER)

    assert {"missing-open", "open-task"} <= after(task)
    assert after(result) == {"unscored-result"}
    assert after(feedback) == {"feedback-unanswered"}
    assert after(late) == {"stray-outcome"}
    assert after(lambda log: altered(log.outcomes, 0, event_time=LATER)) == {"outcome-reward"}


@pytest.mark.parametrize("kind", LossKind)
def test_the_record_of_a_loss_tells_where_it_begins(kind: LossKind) -> None:
    proofs = {
        LossKind.CUT: "offset 9 was reached, and the log ends at 7",
        LossKind.UNREAD: "offset 5 is the next one to read, and the log begins at 8",
    }
    loss = PartitionLoss(topics.ROLLOUTS, 3, kind, proofs.get(kind, "its id was a and is b"), 2)
    record = loss_audit(loss, TRAINER, "run")
    first, end = 7 if kind is LossKind.CUT else 0, 8 if kind is LossKind.UNREAD else None
    assert accepted_loss(record) == AcceptedLoss(topics.ROLLOUTS, 3, TRAINER, record.event_time, first, end)
    whole = loss_audit(replace(loss, partition=0), ADMIN, "topics")
    assert accepted_loss(whole).partition is None


def test_a_task_that_was_opened_too_late_is_not_given_up() -> None:
    log = without_halves()
    log.losses = [HALVES_LOST]
    task = log.tasks[-1].record
    assert any(seen.record.key == f"{task.task_id}/0/late/{derived_id('open', task.task_id)}" for seen in log.outcomes)
    assert check(log).numbers["given_up"] == 0


def test_a_loss_before_a_move_of_the_topics_is_of_every_partition() -> None:
    record = loss_audit(
        PartitionLoss(topics.HALVES, PARTITION, LossKind.RECREATED, "its id was a and is b", 0), JOIN, JOIN
    )
    move = record.model_copy(update={"record_type": MOVED, "event_time": LATER})
    before, after = replace(HALVES_LOST, at=LATER - 1, first=4), replace(HALVES_LOST, at=LATER, first=4)
    assert placed_anew([before, after], [move]) == [replace(before, partition=None, first=0), after]
    assert placed_anew([before], []) == [before]


def test_a_score_that_is_there_must_be_that_of_the_outcome() -> None:
    log = consistent()
    log.losses = [HALVES_LOST]
    altered(log.outcomes, 0, reward=0.75)
    assert "outcome-reward" in rules(log)


def on_the_new_topic(log: Log) -> None:
    """Two rollouts that no plan names, at the first offsets."""
    last = log.rollouts[-1]
    new = [last.record.model_copy(update={"rollout_id": f"new-{offset}"}) for offset in range(2)]
    log.rollouts[:] = [replace(last, record=record, offset=offset) for offset, record in enumerate(new)]
    log.losses = [ROLLOUTS_LOST]


@pytest.mark.parametrize(("at", "found"), [(T0, False), (LATER + 1, True)], ids=["before", "after"])
def test_the_drops_before_a_loss_count_no_record_of_the_new_topic(at: int, found: bool) -> None:
    log = consistent()
    on_the_new_topic(log)
    drop = Drop(partition=PARTITION, first_offset=0, last_offset=3, count=1, reason="stale")
    altered(log.plans, 2, drops=(drop,), event_time=at)
    assert ("drop-count" in rules(log)) is found


def test_a_run_that_began_at_a_greater_offset_reads_the_new_topic_from_its_beginning() -> None:
    log = consistent()
    on_the_new_topic(log)
    start = log.plans[2].record.low_water[0].model_copy(update={"offset": 3})
    altered(log.manifests, 0, start=(start,))
    altered(log.plans, 2, event_time=LATER + 1, drops=())
    lost = {problem.where for problem in check(log).problems if problem.rule == "untrained-rollout"}
    assert lost == {"new-0", "new-1"}
