"""Reads the audit topic."""

from collections.abc import Sequence

from schemas import topics
from schemas.records import AuditRecord
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.identity import PartitionLoss
from tentalis.kafka.loss_audit import ADMIN, TOPIC_LOST, loss_audit
from tentalis.kafka.skipped import SKIPPED
from tentalis.service.settings import Settings


def audit_records(settings: Settings, codec: Codec, record_type: str) -> list[AuditRecord]:
    """Returns the audit records about records of one type, in log order; none without the topic.

    Raises Forbidden, KafkaException, TimeoutError.
    """
    found = []
    try:
        for stored in read_to_end(settings, topics.AUDIT):
            try:
                record = stored.decode(codec)
            except DecodeError as error:
                SKIPPED.add(error)
                continue
            if isinstance(record, AuditRecord) and record.record_type == record_type:
                found.append(record)
    except NoSuchTopic:
        return []
    return found


def not_given_up(settings: Settings, codec: Codec, losses: Sequence[PartitionLoss], owner: str) -> list[PartitionLoss]:
    """Returns the losses of an application or a run, `owner`, that have no record of their acceptance.

    Raises Forbidden, KafkaException, TimeoutError.
    """
    if not losses:
        return []
    accepted = {record.audit_id for record in audit_records(settings, codec, TOPIC_LOST)}
    return [loss for loss in losses if loss_audit(loss, ADMIN, owner).audit_id not in accepted]
