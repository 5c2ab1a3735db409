"""The open tasks that a state rebuilt from the log lacks."""

from dataclasses import replace

import pytest

from schemas import topics
from schemas.records import Message, Opens, Source, Task
from streams.apps.join.halves_before import HalvesThere, TasksLacking, lacking
from tentalis.kafka.loss_audit import AcceptedLoss, accepted_loss
from tests.support.join_support import head, open_

SINCE, UNTIL = 10_000, 10_400


def task(name: str, n: int = 1, **terms: object) -> Task:
    made = head(name, n, **terms)
    fields = {field: getattr(made, field) for field in type(made).model_fields}
    return Task(event_time=1, messages=(Message(role="user", content="?"),), **fields)


def there(*opened: str) -> HalvesThere:
    """A log that begins at 7, with two records."""
    found = HalvesThere(7)
    found.add(None, SINCE)
    for name in opened:
        found.add(open_(head(name), SINCE), SINCE)
    found.add(None, UNTIL)
    found.add(None, UNTIL - 1)
    return found


def test_open_tasks_from_before_the_log_are_lacking() -> None:
    assert (there().since, there().until) == (SINCE, UNTIL)
    assert lacking(there(), [(task("t"), SINCE - 1)], {}, set()) == ["t"]


@pytest.mark.parametrize(
    ("written", "opened", "finished"),
    [
        (SINCE, (), set()),
        (SINCE - 1, ("t",), set()),
        (SINCE - 1, (), {"t/0"}),
        (UNTIL - 1000, (), set()),
    ],
    ids=["written-after", "its-open-is-there", "it-has-its-outcome", "its-deadline-has-passed"],
)
def test_other_tasks_are_not_lacking(written: int, opened: tuple[str, ...], finished: set[str]) -> None:
    assert lacking(there(*opened), [(task("t"), written)], {}, finished) == []


def test_a_task_with_one_open_sample_is_lacking() -> None:
    assert lacking(there(), [(task("t", 2), SINCE - 1)], {}, {"t/0"}) == ["t"]
    assert lacking(there(), [(task("t", 2), SINCE - 1)], {}, {"t/0", "t/1"}) == []


def test_a_task_that_waits_for_feedback_is_lacking_once_it_has_some() -> None:
    waits = task("t", rl=Source.USER, opd=None, opens=Opens.FIRST_FEEDBACK)
    found = [lacking(there(), [(waits, 1)], graded, set()) for graded in ({}, {"t": SINCE - 1}, {"t": SINCE})]
    assert found == [[], ["t"], []]


def test_without_any_half_every_open_task_is_lacking() -> None:
    assert lacking(HalvesThere(7), [(task("t"), 1), (task("u"), 1)], {}, {"u/0"}) == ["t"]


def test_the_verifier_reads_the_record_as_a_loss_of_what_was_before() -> None:
    found = TasksLacking(3, 7, SINCE, ("a", "b"))
    assert str(found) == "2 in partition 3, which begins at 7"
    assert accepted_loss(found.audit()) == AcceptedLoss(topics.HALVES, 3, "tentalis-join", SINCE)
    assert replace(found, begin=8).audit().audit_id != found.audit().audit_id
