"""The candidate of a policy: published, and neither served nor passed over."""

import pytest

from schemas.records import Record
from tentalis.policies.candidates import Candidates, issue_metadata, issued_for
from tests.support.loop_records import ack, promotion, task, update

SERVED = [update(1), promotion(1), ack(1)]


@pytest.mark.parametrize(
    ("records", "candidate"),
    [
        ([], None),
        ([update(1)], 1),
        (SERVED, None),
        ([*SERVED, update(2)], 2),
        ([*SERVED, update(2), promotion(2)], 2),
        ([*SERVED, update(2), promotion(2), ack(2)], None),
        # The server tries to load it again.
        ([*SERVED, update(2), ack(2, ok=False)], 2),
        ([*SERVED, update(2), promotion(2), ack(2, ok=False), ack(1)], 2),
        ([*SERVED, update(2), promotion(1, mode="rollback")], None),
        ([*SERVED, update(2), promotion(1, mode="rollback"), update(3)], 3),
        # Topics are read one after the other, and compaction leaves the last promotion and acknowledgement alone.
        ([ack(1), update(1), update(2), promotion(1, mode="rollback")], None),
        ([ack(2), ack(1), update(2), promotion(1, mode="rollback")], None),
        ([ack(2), ack(1), update(2), promotion(2, mode="manual")], 2),
        ([ack(1), update(2), promotion(2, mode="manual")], 2),
        ([promotion(1), update(2), ack(1)], 2),
        # A late decision says nothing of what was published meanwhile; a rollback ends the run that published last.
        ([*SERVED, update(2), update(3), promotion(2, mode="guarded")], 3),
        ([*SERVED, update(2, sha256="t"), promotion(1, mode="rollback"), update(3, sha256="u")], None),
        ([*SERVED, update(2, sha256="t"), promotion(1, mode="rollback"), update(3, run_id="run-1.1")], 3),
    ],
)
def test_a_candidate_is_the_newest_version_until_it_is_decided_on(records: list[Record], candidate: int | None) -> None:
    fold = Candidates()
    for record in records:
        fold.apply(record)
    assert fold.version("assistant") == candidate
    assert fold.version("other") is None


def test_a_task_is_covered_while_the_version_that_it_was_issued_for_is_the_candidate() -> None:
    fold = Candidates()
    for record in [*SERVED, update(2)]:
        fold.apply(record)
    tasks = [task(metadata=metadata) for metadata in ({"served": "assistant@v2"}, {"served": "assistant@v1"}, {})]
    assert [fold.covers(each) for each in tasks] == [True, False, False]
    fold.apply(ack(2))
    assert not fold.covers(tasks[0])


def test_the_acknowledgement_of_another_server_decides_nothing_here() -> None:
    fold = Candidates("local")
    for record in [*SERVED, update(2), promotion(2), ack(2, server_id="other")]:
        fold.apply(record)
    assert fold.version("assistant") == 2


def test_a_version_is_published_with_a_newer_one() -> None:
    fold = Candidates()
    assert not fold.published("assistant", 1)
    fold.apply(update(2))
    assert [fold.published("assistant", version) for version in (1, 2, 3)] == [True, True, False]


def test_a_task_names_the_version_that_it_was_issued_for() -> None:
    assert issued_for(task()) is None
    assert issued_for(task(metadata=issue_metadata("assistant", 4))) == 4
    with pytest.raises(ValueError, match="latest"):
        issued_for(task(metadata={"served": "latest"}))
