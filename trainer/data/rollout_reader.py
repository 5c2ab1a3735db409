"""This rank's share of the rollout topic: reads records, dead-letters invalid ones, offers the rest."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.dlq.owner import DeadLetterWriter
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.acls import Operation
from tentalis.kafka.config import consumer_config
from tentalis.kafka.consumer import Stored, records_behind
from tentalis.kafka.errors import passes, refused
from tentalis.kafka.producer import Publisher
from tentalis.service import tracing
from tentalis.service.settings import Settings
from trainer.config.loss import LossConfig
from trainer.data.candidates import (
    IMPORTER,
    SKIPPED,
    Offer,
    ReadSegment,
    lacks_topk,
    malformed_reason,
    offer_of,
    untrainable_tokens,
)
from trainer.data.fetch import RolloutCache
from trainer.distributed.consumer_group import TrainerFenced, consumer_group, member_id

log = logging.getLogger(__name__)

POLL_RECORDS = 500


class RolloutReader:
    """A static member of the policy's consumer group. Start offsets come from the checkpoint; the group's committed
    offsets are for monitoring only."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        publisher: Publisher,
        cache: RolloutCache,
        *,
        policy: str,
        rank: int,
        vocab_size: int,
        max_tokens: int,
        loss: LossConfig,
        low_water: Mapping[int, int],
    ) -> None:
        """`low_water`: the first offset to read, per partition. Dead letters are written through `publisher`."""
        self._settings, self._codec, self._cache = settings, codec, cache
        self._policy, self._vocab_size, self._max_tokens, self._loss = policy, vocab_size, max_tokens, loss
        group = consumer_group(policy)
        self._letters = WrittenLetters(settings)
        limits = DeadLetterLimits.of(settings.dead_letters, group)
        self._dead_letters = DeadLetterWriter(publisher, group, self._letters, limits)
        self._low_water = dict(low_water)
        self._next_offsets: dict[int, int] = {}
        self._paused = False
        self.n_dead = 0
        """Dead letters written."""
        self.n_without_topk = 0
        """Rollouts whose OPD part trains nothing: the loss needs top-K, and their teacher was not asked for it."""
        self._consumer = Consumer(
            consumer_config(settings, group, instance=member_id(rank))
            | {"enable.partition.eof": True, "fetch.wait.max.ms": 100}
        )
        self._consumer.subscribe([topics.ROLLOUTS], on_assign=self._on_assign, on_revoke=self._on_revoke)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # A partition that was added to the topic since the run began is read from its first offset on.
        self._next_offsets = {p.partition: self._low_water.setdefault(p.partition, 0) for p in partitions}
        self._letters.forget()
        log.info("reading partitions %s of %s", sorted(self._next_offsets), topics.ROLLOUTS)
        consumer.assign([TopicPartition(topics.ROLLOUTS, p, offset) for p, offset in self._next_offsets.items()])
        if self._paused and self._next_offsets:
            consumer.pause([TopicPartition(topics.ROLLOUTS, p) for p in self._next_offsets])

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next_offsets = {}

    def poll(self, timeout: float) -> list[ReadSegment]:
        """Reads for up to `timeout` seconds and returns the records as offers; dead letters are confirmed before it
        returns. Raises Forbidden and KafkaException for errors that are not transient, TrainerFenced if a successor
        took this rank's place, TooManyDead past the limits of dead letters."""
        offers: dict[int, list[Offer]] = {}
        ends: dict[int, int] = {}
        starts = dict(self._next_offsets)
        records: list[tuple[Stored, DecodeError | None]] = []
        for message in self._consumer.consume(POLL_RECORDS, timeout):
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[partition] = offset
                elif "fenced" in error.str().lower():  # librdkafka reports a fatal error with this in its text
                    raise TrainerFenced(self._policy)
                elif not passes(error):
                    raise refused(self._settings, error, Operation.READ, topics.ROLLOUTS, consumer_group(self._policy))
                continue
            ends[partition] = offset + 1
            stored = Stored.of(message)
            skipped = self._letters.skipped(stored)
            try:
                offer = self._offer(stored)
            except DecodeError as cause:
                records.append((stored, cause))
                continue
            records.append((stored, None))
            if offer is not None:
                offers.setdefault(partition, []).append(replace(offer, unfit=SKIPPED) if skipped else offer)
        self.n_dead += self._dead_letters.write(records)
        segments = []
        for partition, end in ends.items():
            # A rebalance within this poll revoked or reassigned the partition: it is read again from its start.
            start = starts.get(partition, self._next_offsets.get(partition))
            if start is None or partition not in self._next_offsets:
                continue
            self._next_offsets[partition] = end
            if end > start:
                segments.append(ReadSegment(partition, start, end, tuple(offers.get(partition, ()))))
        return segments

    def pause_reading(self, paused: bool) -> None:
        """Pauses or resumes fetching. While paused the member stays in its group, because `poll` is still called."""
        self._paused = paused
        positions = [TopicPartition(topics.ROLLOUTS, p) for p in self._next_offsets]
        if positions:
            (self._consumer.pause if paused else self._consumer.resume)(positions)
        log.info("reading is %s", "paused: enough offers are in memory" if paused else "resumed")

    def lag(self) -> dict[int, int]:
        """Returns, per own partition, the unread records as of the last fetch; 0 before the first."""
        positions = (TopicPartition(topics.ROLLOUTS, *place) for place in self._next_offsets.items())
        return {each.partition: records_behind(self._consumer, each) or 0 for each in positions}

    def _offer(self, stored: Stored) -> Offer | None:
        """Returns None for records that are not offers: another policy's (its own trainer judges them), tombstones,
        imported rollouts. Raises DecodeError for an invalid rollout."""
        partition, offset = stored.partition, stored.offset
        if stored.value is None:
            return None
        record = stored.decode_own(self._codec)
        assert isinstance(record, Rollout)
        if record.head.policy != self._policy:
            return None
        problem = _invalid_reason(record, self._vocab_size)
        if problem is not None:
            place = {"topic": topics.ROLLOUTS, "partition": partition, "offset": offset}
            raise DecodeError(problem, schema="Rollout", stage="validate", **place)  # type: ignore[arg-type]
        if ("ce_source", IMPORTER.encode()) in stored.headers:
            return None
        traceparent = tracing.traceparent_of(stored.headers) if tracing.enabled() else None
        self._cache.put(partition, offset, record, traceparent)
        self.n_without_topk += lacks_topk(record, self._loss)
        offer = offer_of(record, partition, offset, stored.timestamp, self._max_tokens, self._loss)
        reason = untrainable_tokens(record, self._vocab_size)
        return offer if reason is None or offer.unfit is not None else replace(offer, unfit=reason)

    def commit_offsets(self, low_water: Mapping[int, int]) -> None:
        """Commits the considered offsets after a step is published, for consumer lag monitoring."""
        self._low_water.update(low_water)
        positions = [TopicPartition(topics.ROLLOUTS, p, self._low_water[p]) for p in self._next_offsets]
        if not positions:
            return
        try:
            self._consumer.commit(offsets=positions, asynchronous=False)
        except KafkaException as error:
            # Only monitoring depends on it, and the next step commits again.
            log.warning("offsets not committed (the next step retries): %s", error.args[0].str())

    def close(self) -> None:
        """Closes the consumer. As a static member it does not leave the group: its partitions stay assigned for the
        session timeout."""
        self._consumer.close()


def _invalid_reason(rollout: Rollout, vocab_size: int) -> str | None:
    if not digest_holds(rollout):
        return f"forged: the content of {rollout.key} does not match its digest"
    return malformed_reason(rollout, vocab_size)
