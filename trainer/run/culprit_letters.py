"""The dead letters of rollouts that were dropped because their step was not finite."""

from collections.abc import Mapping

from schemas.records import BatchPlan
from schemas.wire.codec import Codec, DecodeError
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.dlq.owner import DeadLetterWriter
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.consumer import Stored
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from trainer.data.fetch import find_stored
from trainer.distributed.consumer_group import consumer_group


class UntrainableRollout(DecodeError):
    """A rollout that can be read, but makes its step not finite."""


def write_culprits(settings: Settings, codec: Codec, plan: BatchPlan, culprits: Mapping[str, str]) -> None:
    """Writes a dead letter for each culprit (key -> reason) of a plan, and returns when all are confirmed. One that has
    a letter gets no other. Raises the errors of `DeadLetterWriter.write`."""
    rows = [row for row in plan.rows if row.rollout_id in culprits]
    failed: list[tuple[Stored, DecodeError | None]] = []
    for stored in find_stored(settings, codec, rows):
        reason = f"dropped from step {plan.step} of run {plan.run_id}: {culprits[stored.key or '']}"
        error = UntrainableRollout(
            reason,
            topic=stored.topic,
            partition=stored.partition,
            offset=stored.offset,
            schema="Rollout",
            stage="train",
        )
        failed.append((stored, error))
    publisher = Publisher(settings, "tentalis-trainer", codec)
    # A whole batch may be dropped: the limits guard against draining a topic, and a plan is finite.
    limits = DeadLetterLimits(run=len(failed), ratio=1.0, window=max(1, len(failed)))
    DeadLetterWriter(publisher, consumer_group(plan.policy), WrittenLetters(settings), limits).write(failed)
