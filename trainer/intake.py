"""This rank's share of the rollout topic: reads, dead-letters what is no rollout, offers the rest."""

import logging
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.digest import digest_holds
from schemas.records import Rollout
from tentalis import tracing
from tentalis.acls import Operation
from tentalis.config import Settings
from tentalis.dlq.owner import DeadLetters
from tentalis.kafka import Publisher, Stored, consumer_config, passes
from tentalis.refusal import refused
from trainer.fetch import Cache
from trainer.group import Fenced, group_of, member_of
from trainer.losses.settings import Loss
from trainer.offers import IMPORTER, Offer, Segment, malformed, offer_of, without_topk

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
        rank: int,
        vocab_size: int,
        max_tokens: int,
        loss: Loss,
        low_water: Mapping[int, int],
    ) -> None:
        """`low_water`: per partition the first offset to read. Dead letters go through `publisher`."""
        self._settings, self._codec, self._cache = settings, codec, cache
        self._policy, self._vocab_size, self._max_tokens, self._loss = policy, vocab_size, max_tokens, loss
        group = group_of(policy)
        self._letters = DeadLetters(publisher, group)
        self._low_water = dict(low_water)
        self._next: dict[int, int] = {}
        self._held = False
        self.dead = 0
        """Dead letters written."""
        self.without_topk = 0
        """Rollouts whose OPD part trains nothing, since top-K is asked for and their teacher was not asked for it."""
        self._consumer = Consumer(
            consumer_config(settings, group, instance=member_of(rank))
            | {"enable.partition.eof": True, "fetch.wait.max.ms": 100}
        )
        self._consumer.subscribe([topics.ROLLOUTS], on_assign=self._assigned, on_revoke=self._revoked)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next = {p.partition: self._low_water[p.partition] for p in partitions}
        log.info("reads partitions %s of %s", sorted(self._next), topics.ROLLOUTS)
        consumer.assign([TopicPartition(topics.ROLLOUTS, p, offset) for p, offset in self._next.items()])
        if self._held and self._next:
            consumer.pause([TopicPartition(topics.ROLLOUTS, p) for p in self._next])

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next = {}

    def poll(self, timeout: float) -> list[Segment]:
        """What was read within `timeout` seconds, as offers; its dead letters are confirmed. Raises Forbidden and
        KafkaException for errors that do not pass by themselves, Fenced if a successor took this rank's place,
        TooManyDead past the limits of dead letters."""
        offers: dict[int, list[Offer]] = {}
        ends: dict[int, int] = {}
        starts = dict(self._next)
        read: list[tuple[Stored, DecodeError | None]] = []
        for message in self._consumer.consume(POLL_RECORDS, timeout):
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[partition] = offset
                elif "fenced" in error.str().lower():  # to the library just a fatal error, with this in its text
                    raise Fenced(self._policy)
                elif not passes(error):
                    raise refused(self._settings, error, Operation.READ, topics.ROLLOUTS, group_of(self._policy))
                continue
            ends[partition] = offset + 1
            stored = Stored.of(message)
            try:
                offer = self._offer(stored)
            except DecodeError as cause:
                read.append((stored, cause))
                self.dead += 1
                continue
            read.append((stored, None))
            if offer is not None:
                offers.setdefault(partition, []).append(offer)
        self._letters.keep(read)
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

    def hold(self, held: bool) -> None:
        """While it is held nothing is fetched, and the member stays in its group: `poll` goes on being called."""
        self._held = held
        own = [TopicPartition(topics.ROLLOUTS, p) for p in self._next]
        if own:
            (self._consumer.pause if held else self._consumer.resume)(own)
        log.info("reading is %s", "held: enough lies in memory" if held else "resumed")

    def lag(self) -> dict[int, int]:
        """Records per own partition that the last fetches knew of and that were not read."""
        behind = {}
        for partition, position in self._next.items():
            _, end = self._consumer.get_watermark_offsets(TopicPartition(topics.ROLLOUTS, partition), cached=True)
            behind[partition] = max(0, end - position)  # the end is negative before the first fetch
        return behind

    def _offer(self, stored: Stored) -> Offer | None:
        """None for another policy's, which are for its own trainer to judge. Raises DecodeError for what is no valid
        rollout."""
        partition, offset = stored.partition, stored.offset
        if stored.value is None:
            return None
        record = stored.decode_own(self._codec)
        assert isinstance(record, Rollout)
        if record.head.policy != self._policy:
            return None
        problem = _problem(record, self._vocab_size)
        if problem is not None:
            place = {"topic": topics.ROLLOUTS, "partition": partition, "offset": offset}
            raise DecodeError(problem, schema="Rollout", stage="validate", **place)  # type: ignore[arg-type]
        if ("ce_source", IMPORTER.encode()) in stored.headers:
            return None
        traceparent = tracing.traceparent_of(stored.headers) if tracing.enabled() else None
        self._cache.put(partition, offset, record, traceparent)
        self.without_topk += without_topk(record, self._loss)
        return offer_of(record, partition, offset, stored.timestamp, self._max_tokens, self._loss)

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


def _problem(rollout: Rollout, vocab_size: int) -> str | None:
    if not digest_holds(rollout):
        return f"forged: the content of {rollout.key} is not what its digest covers"
    return malformed(rollout, vocab_size)
