"""The audit record of a topic's loss that is given up."""

import hashlib

from schemas.ids import derived_id
from schemas.records import AuditRecord
from tentalis.kafka.identity import PartitionLoss
from tentalis.text.timestamps import now_ms


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
        record_type="TopicLost",
        record_id=f"{loss.topic}[{loss.partition}] {loss.kind}: {loss.proof}",
        sha256=hashlib.sha256(b"").hexdigest(),
    )
