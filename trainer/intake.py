"""This rank's share of the rollout topic: reads, dead-letters what is no rollout, offers the rest."""

import logging
import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.digest import digest_holds
from schemas.records import Rollout
from tentalis import tracing
from tentalis.acls import Operation
from tentalis.config import Settings
from tentalis.dlq import context_headers
from tentalis.kafka import TRANSIENT, Publisher, consumer_config, headers_in
from tentalis.refusal import refused
from trainer.fetch import Cache
from trainer.offers import Offer, Segment, malformed, offer_of
from trainer.runtime import versions

log = logging.getLogger(__name__)

POLL_RECORDS = 500


class Intake:
    """A static member of the policy's consumer group. Where it reads from is told, not remembered by the group: the
    checkpoint knows; the group's offsets are for monitoring."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        publisher: Publisher,
        cache: Cache,
        *,
        policy: str,
        instance: str,
        vocab_size: int,
        max_tokens: int,
        low_water: Mapping[int, int],
    ) -> None:
        """`low_water`: per partition the first offset to read. Dead letters go through `publisher`."""
        self._settings, self._codec, self._publisher, self._cache = settings, codec, publisher, cache
        self._policy, self._vocab_size, self._max_tokens = policy, vocab_size, max_tokens
        self._group = group_of(policy)
        self._low_water = dict(low_water)
        self._next: dict[int, int] = {}
        self.dead = 0
        """Dead letters written."""
        self._version = versions(("tentalis",))["tentalis"]
        self._consumer = Consumer(
            consumer_config(settings, self._group, instance=instance)
            | {"enable.partition.eof": True, "fetch.wait.max.ms": 100}
        )
        self._consumer.subscribe([topics.ROLLOUTS], on_assign=self._assigned, on_revoke=self._revoked)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next = {p.partition: self._low_water[p.partition] for p in partitions}
        log.info("reads partitions %s of %s", sorted(self._next), topics.ROLLOUTS)
        consumer.assign([TopicPartition(topics.ROLLOUTS, p, offset) for p, offset in self._next.items()])

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next = {}

    def poll(self, timeout: float) -> list[Segment]:
        """What was read within `timeout` seconds, as offers; its dead letters are confirmed. Raises Forbidden and
        KafkaException for errors that do not pass by themselves, and if a successor with this rank's name took over."""
        offers: dict[int, list[Offer]] = {}
        ends: dict[int, int] = {}
        starts = dict(self._next)
        before = self.dead
        for message in self._consumer.consume(POLL_RECORDS, timeout):
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[partition] = offset
                elif not error.retriable() and error.code() not in TRANSIENT | {KafkaError._MAX_POLL_EXCEEDED}:
                    raise refused(self._settings, error, Operation.READ, topics.ROLLOUTS, self._group)
                continue
            ends[partition] = offset + 1
            try:
                offer = self._offer(message)
            except DecodeError as cause:
                log.error("dead letter: %s", cause)
                self._bury(message, cause)
                self.dead += 1
                continue
            if offer is not None:
                offers.setdefault(partition, []).append(offer)
        if self.dead > before:
            self._publisher.flush()
        segments = []
        for partition, end in ends.items():
            # A rebalance within this poll took the partition away, or gave it anew: it is read again from its start.
            start = starts.get(partition, self._next.get(partition))
            if start is None or partition not in self._next:
                continue
            self._next[partition] = end
            if end > start:
                segments.append(Segment(partition, start, end, tuple(offers.get(partition, ()))))
        return segments

    def lag(self) -> dict[int, int]:
        """Records per own partition that the last fetches knew of and that were not read."""
        behind = {}
        for partition, position in self._next.items():
            _, end = self._consumer.get_watermark_offsets(TopicPartition(topics.ROLLOUTS, partition), cached=True)
            behind[partition] = max(0, end - position)  # the end is negative before the first fetch
        return behind

    def _offer(self, message: Message) -> Offer | None:
        """Raises DecodeError for what is no valid rollout."""
        partition, offset, value = int(message.partition()), int(message.offset()), message.value()
        if value is None:
            return None
        record = self._codec.decode(
            value, topic=topics.ROLLOUTS, partition=partition, offset=offset, expected=("Rollout",)
        )
        assert isinstance(record, Rollout)
        problem = self._problem(record, message.key())
        if problem is not None:
            place = {"topic": topics.ROLLOUTS, "partition": partition, "offset": offset}
            raise DecodeError(problem, schema="Rollout", stage="validate", **place)  # type: ignore[arg-type]
        if record.head.policy != self._policy:
            return None
        traceparent = tracing.traceparent_of(headers_in(message)) if tracing.enabled() else None
        self._cache.put(partition, offset, record, traceparent)
        return offer_of(record, partition, offset, int(message.timestamp()[1]), self._max_tokens)

    def _problem(self, rollout: Rollout, key: bytes | None) -> str | None:
        if key != rollout.key.encode():
            return f"the record's key is {key!r}, but it holds the rollout {rollout.key!r}"
        if not digest_holds(rollout):
            return f"forged: the content of {rollout.key} is not what its digest covers"
        if rollout.head.policy == self._policy:
            return malformed(rollout, self._vocab_size)
        return None

    def _bury(self, message: Message, cause: DecodeError) -> None:
        headers = [(name, value or b"") for name, value in headers_in(message)]
        headers += context_headers(
            topic=str(message.topic()),
            partition=int(message.partition()),
            offset=int(message.offset()),
            timestamp=int(message.timestamp()[1]),
            group=self._group,
            error_class=type(cause).__name__,
            error=str(cause),
            stage=cause.stage,
            attempts=1,
            version=self._version,
            failed_at=time.time(),
        )
        dlq = topics.dlq(topics.ROLLOUTS)
        self._publisher.send_bytes(dlq, message.key(), message.value(), headers, partition=message.partition())

    def done(self, low_water: Mapping[int, int]) -> None:
        """A step is published: commits, for whoever watches the group's lag, what it has considered."""
        self._low_water.update(low_water)
        own = [TopicPartition(topics.ROLLOUTS, p, self._low_water[p]) for p in self._next]
        if not own:
            return
        try:
            self._consumer.commit(offsets=own, asynchronous=False)
        except KafkaException as error:
            # Nothing depends on it, and the next step commits again.
            log.warning("offsets not committed: %s", error.args[0].str())

    def close(self) -> None:
        """Leaves (as a static member: its partitions wait for it for the session timeout)."""
        self._consumer.close()


def group_of(policy: str) -> str:
    """The consumer group that trains a policy."""
    return f"tentalis-trainer-{policy}"
