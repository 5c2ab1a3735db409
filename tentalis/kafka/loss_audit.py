"""The audit records of topics: of a loss that is given up, how it is written and what it tells its readers; and of a
record of ids that begins."""

import hashlib
import re
from dataclasses import dataclass

from schemas import topics
from schemas.ids import derived_id
from schemas.records import AuditRecord
from tentalis.kafka.identity import LossKind, PartitionLoss
from tentalis.text.timestamps import now_ms

ADMIN = "tentalis-admin"
"""The component of `topics apply`. Its records are of whole topics."""
TOPIC_LOST = "TopicLost"
_CUT = re.compile(rf"\] {LossKind.CUT}: .* the log ends at (\d+)$")
_UNREAD = re.compile(rf"\] {LossKind.UNREAD}: .* the log begins at (\d+)$")


def loss_audit(loss: PartitionLoss, component: str, owner: str) -> AuditRecord:
    """Returns the audit record of a loss.

    Args:
        component: the application that gives it up.
        owner: the application or the run whose loss it is. The same loss of one owner has one id.
    """
    return AuditRecord(
        audit_id=derived_id("topic-lost", owner, loss.topic, loss.partition, loss.proof),
        event_time=now_ms(),
        component=component,
        topic=loss.topic,
        partition=loss.partition,
        offset=loss.records,
        record_type=TOPIC_LOST,
        record_id=f"{loss.topic}[{loss.partition}] {loss.kind}: {loss.proof}",
        sha256=hashlib.sha256(b"").hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """A loss that an operator accepted.

    Attributes:
        partition: None for the whole topic.
        component: the application that accounted for it.
        at: the time of the acceptance (ms).
        first: the first offset that was lost: 0, or the end of a log that was cut off.
        end: the first offset after it that was not lost, the beginning of a log whose records were removed unread;
            None if all were lost.
    """

    topic: str
    partition: int | None
    component: str
    at: int
    first: int = 0
    end: int | None = None


def accepted_loss(record: AuditRecord) -> AcceptedLoss:
    """Reads the record of `loss_audit`."""
    cut, unread = _CUT.search(record.record_id), _UNREAD.search(record.record_id)
    return AcceptedLoss(
        record.topic,
        None if record.component == ADMIN else record.partition,
        record.component,
        record.event_time,
        int(cut[1]) if cut else 0,
        int(unread[1]) if unread else None,
    )


def record_begun(existed: int) -> AuditRecord:
    """Returns the audit record of a record of all topics that begins, or begins anew, on a broker with topics of the
    product; `existed`: their number. A loss from before is not in the new record."""
    now = now_ms()
    return AuditRecord(
        audit_id=derived_id("topic-ids-begun", now, existed),
        event_time=now,
        component=ADMIN,
        topic=topics.TOPIC_IDS,
        partition=0,
        offset=existed,
        record_type="TopicIdsBegun",
        record_id=f"{topics.TOPIC_IDS} took {existed} topics as they were",
        sha256=hashlib.sha256(b"").hexdigest(),
    )
