"""A topic that was moved to more partitions is told from one that was lost by the records of its moves."""

from schemas import topics
from schemas.records import AuditRecord
from tentalis.kafka.moved_topics import MOVED, moved_text, was_moved


def record_of(before: str, after: str) -> AuditRecord:
    return AuditRecord(
        audit_id=f"{before}-{after}",
        event_time=1,
        component="tentalis-repartition",
        topic=topics.ROLLOUTS,
        partition=0,
        offset=0,
        record_type=MOVED,
        record_id=moved_text(before, after),
        sha256="-",
    )


def test_moves_are_followed_in_their_order() -> None:
    found = [record_of("a", "b"), record_of("b", "c"), record_of("x", "y")]
    assert was_moved(found, "a", "c") and was_moved(found, "b", "c") and was_moved(found, "x", "y")
    assert not was_moved(found, "c", "a") and not was_moved(found, "a", "y") and not was_moved([], "a", "b")
