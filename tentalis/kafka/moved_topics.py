"""Topics that were moved to more partitions (`tentalis topics repartition`): another id, the same records.

The move leaves a record on the audit topic. By it the trainer reads a moved rollouts topic from the beginning, and
passes over the rollouts that its plans name, where it would refuse a topic that was lost. The verifier looks for the
halves of earlier rollouts by their ids.
"""

from collections.abc import Iterable

from schemas.records import AuditRecord
from schemas.wire.codec import Codec
from tentalis.kafka.audit_log import audit_records
from tentalis.service.settings import Settings

MOVED = "TopicRepartitioned"
APPEND_TIME = "tentalis.append-time"
"""Header of a record that was unread when its topic was moved: its timestamp is the time of its append before."""


def moved_text(before: str, after: str) -> str:
    """Returns the id of the record of a move.

    >>> moved_text("2jHqGx1kT", "b7uVn0cQR")
    '2jHqGx1kT b7uVn0cQR'
    """
    return f"{before} {after}"


def moves(settings: Settings, codec: Codec, topic: str) -> list[AuditRecord]:
    """Returns the records of the moves of a topic, the last one last."""
    return [record for record in audit_records(settings, codec, MOVED) if record.topic == topic]


def was_moved(found: Iterable[AuditRecord], before: str, after: str) -> bool:
    """True if, by these `moves`, the topic of the id `after` was made of the one with the id `before`."""
    known = {before}
    for record in found:
        old, _, new = record.record_id.partition(" ")
        if old in known:
            known.add(new)
    return after in known
