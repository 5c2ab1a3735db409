"""Gives up the work of lost topics: reads what is left, lets the application account for it, and records the loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from schemas import topics
from streams.runtime.dlq import Produce
from streams.runtime.log_reader import log_record
from streams.runtime.processor import Accountable, Change, Effects, LogRecord, LostPartition, OutputRecord, Processor
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import messages_to_end, read_to_end
from tentalis.kafka.identity import CommittedOffset, LossKind, PartitionLoss, described
from tentalis.kafka.loss_audit import loss_audit
from tentalis.kafka.producer import headers_of
from tentalis.service.settings import Settings


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Accounts for the loss of one partition: records of the application, audit records, and the whole state that is
    left."""

    reason: str
    outputs: Sequence[Produce] = ()
    audit: Sequence[Produce] = ()
    changes: Sequence[Sequence[Change]] = field(default_factory=list)


class TopicLoss:
    """The losses of the partitions of one application. Its methods block.

    Args:
        committed: the committed offsets of the group.
        left: what is left of the state of each partition.
        progressed: called for every record that is read.
    """

    def __init__(
        self,
        settings: Settings,
        processor: Processor,
        changelog: str | None,
        losses: Sequence[PartitionLoss],
        committed: Mapping[tuple[str, int], CommittedOffset],
        left: Mapping[int, Mapping[str, bytes]],
        progressed: Callable[[], None],
    ) -> None:
        self._left, self._progressed = left, progressed
        self._settings, self._processor, self._changelog = settings, processor, changelog
        self._losses, self._committed = losses, committed

    def described(self) -> str:
        """Describes the losses, with the number of samples or of entries of the state that would be given up."""
        text = described(self._losses)
        if unread := sorted({loss.topic for loss in self._losses if loss.kind is LossKind.UNREAD}):
            text += f". The unread records of {', '.join(unread)} would be passed over"
        partitions = sorted({each.partition for each in self._losses if not self.keeps_state(each.partition)})
        if self._changelog is None or not partitions:
            return text
        if not all(self._countable(partition) for partition in partitions):
            return f"{text}. Work that is open in the state would be given up; it could not be counted"
        if not isinstance(self._processor, Accountable):
            entries = sum(len(self._left.get(partition, ())) for partition in partitions)
            return f"{text}. {entries:,} entries that are left of the state would be given up"
        count = sum(
            output.topic == self._processor.outcomes
            for partition in partitions
            for output in self._account(self._processor, partition).outputs
        )
        return f"{text}. {count:,} samples of open tasks would get no outcome"

    def keeps_state(self, partition: int) -> bool:
        """True if only unread records of inputs are lost: the state is about the records before them, and stays."""
        return all(loss.kind is LossKind.UNREAD for loss in self._losses if loss.partition == partition)

    def _countable(self, partition: int) -> bool:
        """True if the open work is known: from the state that is left, or from the input if the state is lost."""
        if self._kind(str(self._changelog), partition) is None:
            return partition in self._left
        unread = any(self._kind(topic, partition) is LossKind.UNREAD for topic in self._processor.topics)
        return isinstance(self._processor, Accountable) and not self._sources_lost() and not unread

    def give_up(self, partition: int) -> GivenUp:
        """Accounts for the loss of a partition."""
        effects = Effects()
        if isinstance(self._processor, Accountable) and not self.keeps_state(partition):
            effects = self._account(self._processor, partition)
        outputs = [_produce(output) for output in effects.outputs]
        own = [loss for loss in self._losses if loss.partition == partition]
        return GivenUp(self._reason(partition), outputs, [self._audit(loss) for loss in own], effects.changes)

    def offsets(self) -> dict[tuple[str, int], int]:
        """The offsets to commit again, with the ids of the topics that are there now."""
        partitions = {loss.partition for loss in self._losses}
        places = {place for place in self._committed if place[1] in partitions}
        # The group may have no offset there any more: then it would begin before the loss again.
        places |= {(loss.topic, loss.partition) for loss in self._losses if loss.kind is LossKind.UNREAD}
        return {place: self._next_offset(*place) for place in sorted(places)}

    def _account(self, processor: Accountable, partition: int) -> Effects:
        (source,) = self._processor.topics
        state_lost = self._kind(str(self._changelog), partition) is not None
        following = self._next_offset(source, partition)
        records = self._read(source, partition, following) if state_lost and not self._sources_lost() else iter(())
        return processor.give_up(
            LostPartition(
                partition,
                self._left.get(partition, {}),
                records,
                self._finished,
                following - 1,
                self._reason(partition),
            )
        )

    def _read(self, source: str, partition: int, end: int) -> Iterator[LogRecord]:
        for message in messages_to_end(self._settings, source, end={partition: end}):
            self._progressed()
            yield log_record(message)

    @cached_property
    def _finished(self) -> set[str]:
        assert isinstance(self._processor, Accountable)
        found = set()
        for stored in read_to_end(self._settings, self._processor.outcomes):
            self._progressed()
            found.add(stored.key or "")
        return found

    def _kind(self, topic: str, partition: int) -> LossKind | None:
        found = (loss.kind for loss in self._losses if (loss.topic, loss.partition) == (topic, partition))
        return next(found, None)

    def _sources_lost(self) -> bool:
        return any(loss.topic in self._processor.topics and loss.kind is not LossKind.UNREAD for loss in self._losses)

    def _next_offset(self, source: str, partition: int) -> int:
        """The offset of the first record that will be read."""
        if self._kind(source, partition) is LossKind.UNREAD:
            place = (source, partition)
            return next(loss.begin for loss in self._losses if (loss.topic, loss.partition) == place)
        committed = self._committed.get((source, partition))
        if committed is None or self._kind(source, partition) is LossKind.RECREATED:
            return 0
        lost = (loss.records for loss in self._losses if (loss.topic, loss.partition) == (source, partition))
        return max(0, committed.offset - next(lost, 0))

    def _reason(self, partition: int) -> str:
        return described(loss for loss in self._losses if loss.partition == partition)

    def _audit(self, loss: PartitionLoss) -> Produce:
        record = loss_audit(loss, self._processor.app_id, self._processor.app_id)
        value = make_codec(self._settings).encode(topics.AUDIT, record)
        return Produce(topics.AUDIT, record.key.encode(), value, tuple(headers_of(record, record.component)), None)


def _produce(output: OutputRecord) -> Produce:
    return Produce(output.topic, output.key.encode(), output.value, output.headers, output.partition)
