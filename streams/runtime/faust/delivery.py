"""Batched delivery for Faust: its consumer, conductor and agents are used, but one message is a batch of records.

`streams.runtime.faust.guards` has the other workarounds, and the Faust version and sources that all of them rely on.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# Faust and aiokafka have no usable type annotations: their classes are Any.

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import KafkaError, OffsetOutOfRangeError
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from faust.serializers.schemas import Schema
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Producer, Transport
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import Service

from schemas.place import RecordPlace
from streams.runtime.faust import headers as header_names
from streams.runtime.processor import LogRecord
from tentalis.kafka.moved_topics import APPEND_TIME
from tentalis.service.lifecycle import Unmendable

POLL_S = 0.25
"""Seconds that a poll waits for records. A rebalance may have to wait as long for a poll."""
IDLE_POLL_S = 0.5
"""The same after IDLE_AFTER polls without records."""
BUSY_POLL_S = 0.05
"""The same while some partitions are at their limits and may accept records again at any moment."""
FETCH_MS, IDLE_FETCH_MS = 250, 1000
"""How long the broker holds a fetch that finds nothing: usually, and after IDLE_AFTER such fetches in a row. aiokafka
sends one fetch per broker at a time: a partition that becomes fetchable again meanwhile waits for its answer. While all
partitions are idle, there is none. A seek waits as well."""
IDLE_AFTER = 20
LOG_APPEND_TIME = 1
"""`timestamp_type` of an aiokafka record with the broker's time of its append."""


@dataclass(slots=True, eq=False)
class Batch:
    """One event of the agent: consecutive records of one partition, `size` bytes of values. `done` after its effects
    are confirmed."""

    records: Sequence[LogRecord]
    next_offset: int
    size: int
    done: bool = False


class WorkerFenced(KafkaError):
    """Another worker has this worker's instance name (static membership)."""


class GroupLost(Exception):
    """The coordinator answered with an error after which aiokafka no longer takes part in the consumer group."""


class NotAppendTime(Unmendable):
    """A record with its producer's timestamp instead of the append time."""


class PositionLost(Exception):
    """The broker does not have the next offset to read: retention or a trim removed records that were not read, or the
    log was cut off."""


class NoAnswer(Exception):
    """The broker did not return committed offsets in time: it is unreachable or too slow."""


class Owner(Protocol):
    """Callbacks on partition assignment and failure; all are called from the application's event loop."""

    def failed(self, error: Exception) -> None:
        """This worker cannot continue and must end."""

    def crashed(self) -> None:
        """Faust has crashed. Called from any thread."""

    async def quiesce(self) -> None:
        """Finishes or abandons every batch: partitions are about to be revoked."""

    def revoked(self) -> None:
        """All partitions are revoked."""

    async def recover(self, partitions: Sequence[int]) -> None:
        """Restores the state of these partitions; none of their records is delivered before this returns."""

    def delivering(self, partitions: Sequence[int]) -> None:
        """The partitions are recovered and their records are delivered from now on."""

    def commit_note(self, topic: str, partition: int) -> str:
        """The metadata for a committed offset. Called from the consumer's thread."""


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """Limits of batched delivery, per topic-partition. No records are taken from the fetcher while more than one batch
    of records is unacknowledged: one batch runs, and the next one grows."""

    max_batch_records: int
    max_batch_bytes: int


@dataclass(slots=True)
class InFlight:
    """Number and bytes of a topic-partition's records that were taken and are not yet acknowledged."""

    records: int = 0
    bytes: int = 0

    def add(self, batch: Batch, sign: int = 1) -> None:
        """Adds a batch that was taken; with `sign` -1, removes one that was acknowledged."""
        self.records += sign * len(batch.records)
        self.bytes += sign * batch.size

    def within(self, limits: DeliveryLimits) -> bool:
        """True if more records may be taken."""
        return self.records <= limits.max_batch_records and self.bytes <= limits.max_batch_bytes


class BatchSchema(Schema):
    """Passes the batch through undecoded. Faust acknowledges a message that it cannot decode and throws into the agent
    (a silent loss and a restart); here the processor decodes, and returns dead letters."""

    def loads_key(self, app: Any, message: Any, **kwargs: Any) -> None:
        return None

    def loads_value(self, app: Any, message: Any, **kwargs: Any) -> Batch:
        return cast(Batch, message.value)


def log_record(record: Any, partitions: int) -> LogRecord:
    """An aiokafka record as the processor sees it; `partitions`: the partition count of its topic.

    Raises:
        NotAppendTime: the record has its producer's timestamp; timeouts would depend on the producer's clock.
    """
    moved = (APPEND_TIME, str(record.timestamp).encode())
    if record.timestamp_type != LOG_APPEND_TIME and moved not in record.headers:
        raise NotAppendTime(
            f"{RecordPlace(record.topic, record.partition, record.offset)} has the time of its producer's clock "
            "(CreateTime), not of its append: one wrong clock would fire every timeout of the partition. "
            f"`tentalis topics apply` sets message.timestamp.type=LogAppendTime on {record.topic} for later records. "
            "Earlier records keep their timestamps: produce them again and move the consumer group past the old ones "
            "(kafka-consumer-groups.sh --reset-offsets), or delete the topic first if its records are not needed"
        )
    key, value = record.key, record.value
    return LogRecord(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        None if key is None else key.decode("utf-8", "surrogateescape"),
        b"" if value is None else value,
        record.headers,
        value is None,
        partitions,
    )


def split(records: Sequence[LogRecord], limits: DeliveryLimits) -> list[list[LogRecord]]:
    """Splits consecutive records into batches within the limits; a record over the byte limit is a batch by itself."""
    batches: list[list[LogRecord]] = []
    size = 0
    for record in records:
        size += len(record.value)
        if not batches or size > limits.max_batch_bytes or len(batches[-1]) >= limits.max_batch_records:
            batches.append([])
            size = len(record.value)
        batches[-1].append(record)
    return batches


def pace_refreshes(client: Any) -> None:
    """Lets an aiokafka client ask for metadata `retry_backoff_ms` after the last answer at the earliest, as others do.

    Upstream's fetcher asks again as soon as that has failed, for as long as a partition has no leader: while
    a broker is away, that is hundreds of look-ups of its name and connections in a second."""
    refresh, ended = client._metadata_update, -float("inf")

    async def paced(cluster: Any, topics: Any) -> Any:
        nonlocal ended
        await asyncio.sleep(max(0.0, ended + client._retry_backoff - time.monotonic()))
        try:
            return await refresh(cluster, topics)
        finally:
            ended = time.monotonic()

    client._metadata_update = paced


def wait_longer_when_idle(fetcher: Any) -> None:
    """Lets the broker hold the fetches of an aiokafka fetcher longer when nothing comes, and as before from the first
    record on: the next fetch is made after this one was counted."""
    fetch, empty = fetcher._proc_fetch_request, 0

    async def counted(assignment: Any, node_id: Any, request: Any) -> bool:
        nonlocal empty
        found = bool(await fetch(assignment, node_id, request))
        empty = 0 if found else empty + 1
        fetcher._fetch_max_wait_ms = IDLE_FETCH_MS if empty >= IDLE_AFTER else FETCH_MS
        return found

    fetcher._proc_fetch_request = counted


class GuardedConsumerThread(AIOKafkaConsumerThread):
    """aiokafka's consumer in its thread, with settings and error handling that Faust lacks."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        header_names.install()
        consumer = super()._create_worker_consumer(transport)
        # Upstream waits 1500 ms on an idle fetch.
        consumer._fetch_max_wait_ms = FETCH_MS
        pace_refreshes(consumer._client)
        self._add_notes(consumer)
        return consumer

    def _add_notes(self, consumer: Any) -> None:
        # Upstream commits with empty metadata.
        commit, note = consumer.commit, self.app.owner.commit_note

        async def commit_with_notes(offsets: Mapping[TopicPartition, Any]) -> None:
            await commit({tp: OffsetAndMetadata(each.offset, note(*tp)) for tp, each in offsets.items()})

        consumer.commit = commit_with_notes

    def reset_lost_positions(self, strategy: int) -> None:
        """Sets what aiokafka does when the broker does not have the next offset to read."""
        self._ensure_consumer()._fetcher._default_reset_strategy = strategy

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        # Partitions that are assigned next may have no committed offset.
        self.reset_lost_positions(OffsetResetStrategy.EARLIEST)
        await super().on_partitions_revoked(revoked)

    async def fetch_notes(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, Any]:
        """The committed offsets of the group, with their metadata."""
        fetched: Mapping[TopicPartition, Any] = await self.call_thread(
            self._ensure_consumer()._coordinator.fetch_committed_offsets, places
        )
        return fetched

    async def on_start(self) -> None:
        await super().on_start()
        wait_longer_when_idle(self._ensure_consumer()._fetcher)
        coordinator = self._ensure_consumer()._coordinator
        self._end_when_lost(coordinator)
        if self.app.conf.consumer_group_instance_id:
            self._end_when_fenced(coordinator)

    def _end(self, error: Exception) -> None:
        self.parent_loop.call_soon_threadsafe(self.app.owner.failed, error)

    def _end_when_lost(self, coordinator: Any) -> None:
        # aiokafka keeps such an error for the next poll and stops its coordination until then. During a rebalance Faust
        # does not poll: the worker would stay outside the group forever.
        push = coordinator._push_error_to_user

        def lost(cause: BaseException) -> None:
            text = f"the coordinator of group {coordinator.group_id} answered with {cause!r}: a restart joins it again"
            error = GroupLost(text)
            error.__cause__ = cause
            self._end(error)

        def push_error_to_user(cause: BaseException) -> Any:
            if not isinstance(cause, WorkerFenced):
                lost(cause)
            return push(cause)

        def coordination_ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (cause := task.exception()) is not None:
                lost(cause)

        coordinator._push_error_to_user = push_error_to_user
        coordinator._coordination_task.add_done_callback(coordination_ended)

    def _end_when_fenced(self, coordinator: Any) -> None:
        # A static member whose id the broker no longer knows was replaced by a successor with the same name. aiokafka
        # would join again and evict the successor, which would join again, and so on. The replaced member ends instead.
        instance, forget = self.app.conf.consumer_group_instance_id, coordinator.reset_generation

        def reset_generation() -> None:
            if coordinator._closing.done():
                forget()
                return
            error = WorkerFenced(
                f"the group {coordinator.group_id} has another member under the name {instance!r}, or this one was "
                "silent for longer than the session timeout. Give each worker its own instance name"
            )
            self._end(error)
            # Retrieves the exception of the heartbeat task, which nothing awaits: the worker has already reported it.
            if (task := asyncio.current_task()) is not None:
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise error

        coordinator.reset_generation = reset_generation

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        # `state.read_changelog` reads the changelog. Faust pauses only its own view of a partition; aiokafka would
        # keep prefetching changelog records that nothing consumes.
        changelogs = {TopicPartition(*tp) for tp in assigned if self.consumer._is_changelog_tp(tp)}
        if changelogs:
            self._ensure_consumer().pause(*changelogs)
        await super().on_partitions_assigned(assigned, generation_id)


class BatchConsumer(Consumer):
    """Batched delivery: one message per partition and poll instead of one per record. An offset is committed only when
    the effects of all records before it are confirmed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: defaultdict[TP, InFlight] = defaultdict(InFlight)
        self._passed: dict[TP, int] = {}
        self._room = asyncio.Event()
        self._polling = asyncio.Lock()
        self._empty_polls = 0
        self.committed_at = time.monotonic()

    def _new_consumer_thread(self) -> GuardedConsumerThread:
        return GuardedConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _drain_messages(self, fetcher: Any) -> None:
        # Upstream makes one message, two tasks and one queue entry of every record: 5k records/s. It also derives the
        # offset to commit from "gaps" of offsets, wrongly (see _new_offset).
        try:
            while not (self.should_stop or fetcher.should_stop):
                if not self.flow_active:
                    await self.wait(self.can_resume_flow)
                    continue
                self._room.clear()
                active = self._get_active_partitions()
                # Records left in the fetcher hold up all partitions of that broker: aiokafka then fetches nothing for
                # 100 ms. So all records are taken together, and the partition queue merges waiting batches into one.
                ready = {tp for tp in active if self._in_flight[tp].within(self.app.delivery_limits)}
                if ready:
                    full = POLL_S if self._empty_polls < IDLE_AFTER else IDLE_POLL_S
                    await self._poll(ready, full if ready == active else BUSY_POLL_S)
                else:
                    # An empty set would mean "all partitions" to aiokafka.
                    await self.wait_for_stopped(self._room.wait(), timeout=POLL_S)
        except self.consumer_stopped_errors:
            if not self.app.should_stop:
                raise
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise
        except OffsetOutOfRangeError as error:
            ((place, offset),) = error.args[0].items()
            self.app.owner.failed(
                PositionLost(
                    f"{RecordPlace(place.topic, place.partition, offset)} is the next record to read, and the broker "
                    "does not have it. The next start says what was lost, or reads on"
                )
            )
        except NotAppendTime as error:
            # Polling ends: no record after this one may be delivered, or this one's offset would be committed.
            self.app.owner.failed(error)

    async def _poll(self, ready: set[TP], seconds: float) -> None:
        # Upstream lets a poll outlive a rebalance and drops its records, because the generation has changed; but if the
        # seek was done before, the position is now past records that were never delivered: they are lost. So a seek
        # waits for the poll (see perform_seek), and records dropped here are read again.
        async with self._polling:
            if not self.flow_active:
                return
            generation = self.app.consumer_generation_id
            fetched = await self._getmany(ready, timeout=seconds)
            self._empty_polls = 0 if fetched else self._empty_polls + 1
            for tp, records in fetched.items():
                count = self.app.partition_counts[tp.topic]
                for batch in split([log_record(record, count) for record in records], self.app.delivery_limits):
                    if not self.flow_active or generation != self.app.consumer_generation_id:
                        return
                    await self._deliver(TP(*tp), batch, generation)
            self._note_passed(ready)

    def _note_passed(self, polled: set[TP]) -> None:
        # Offsets of transaction markers and of records removed by retention are skipped and never acknowledged: they
        # would count as a lag that never ends.
        subscription = self._thread._ensure_consumer()._subscription.subscription
        for tp in polled if subscription is not None and subscription.assignment is not None else ():
            state = subscription.assignment.state_value(TopicPartition(*tp))
            if state is not None and state.has_valid_position and not self._in_flight[tp].records:
                self._passed[tp] = state.position

    async def _deliver(self, tp: TP, records: Sequence[LogRecord], generation: int) -> None:
        last = records[-1]
        batch = Batch(records, last.offset + 1, sum(len(record.value) for record in records))
        message = ConsumerMessage(
            tp.topic,
            tp.partition,
            last.offset,
            last.timestamp / 1000.0,
            0,
            None,
            None,
            batch,
            None,
            0,
            0,
            tp=tp,
            generation_id=generation,
        )
        self._in_flight[tp].add(batch)
        await self.wait_first(self.callback(message), self.suspend_flow.wait())

    def ack(self, message: Any) -> bool:
        # Upstream acknowledges every event that leaves the stream, also events skipped because the generation changed
        # and events whose agent raised. Here only a batch whose effects are confirmed is acknowledged.
        self._unacked_messages.discard(message)
        message.acked = True
        if message.generation_id != self.app.consumer_generation_id:
            return False
        batch: Batch = message.value
        if batch.done:  # else it stays in flight until a seek rereads it, or the worker ends
            self._in_flight[message.tp].add(batch, -1)
            self._room.set()
            self._acked[message.tp] = [batch.next_offset]
        return batch.done

    def _new_offset(self, tp: TP) -> int | None:
        # Upstream's check for a gap at the head is off by one and commits past an unprocessed event (#606, PR #707).
        # Batches of a partition are acknowledged in order, so the last acknowledged offset is the one to commit, on
        # compacted topics too (#378).
        acked = self._acked.get(tp)
        return acked[-1] if acked else None

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        # Upstream treats a failed commit as done, and retries only when a later offset is acknowledged (#611).
        before = {tp: self._committed_offset[tp] for tp in offsets}
        committed = bool(await super()._commit_offsets(offsets, start_new_transaction))
        if committed:
            self.committed_at = time.monotonic()
        else:
            self._committed_offset.update(before)
        return committed

    async def fetch_notes(self, places: Sequence[tuple[str, int]], patience: float) -> dict[tuple[str, int], Any]:
        """The committed offsets of the group, with their metadata. Raises NoAnswer."""
        asked = self._thread.fetch_notes([TopicPartition(*place) for place in places])
        try:
            found = await asyncio.wait_for(asked, patience)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {patience:g} s about the committed offsets: is the broker up?") from error
        return {(place.topic, place.partition): each for place, each in found.items()}

    async def recommit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commits offsets outside the flow of batches, with new metadata. Raises NoAnswer."""
        if offsets and not await self._commit({TP(*place): offset for place, offset in offsets.items()}):
            raise NoAnswer("the offsets of lost partitions could not be committed: the group has rebalanced")

    def uncommitted(self) -> bool:
        """True if an acknowledged offset is not committed yet."""
        return any(self._should_commit(tp, acked[-1]) for tp, acked in self._acked.items() if acked)

    def lag(self, ends: Mapping[tuple[str, int], int]) -> dict[TP, int]:
        """Unacknowledged records on the log per owned partition, up to the last fetch's end offset or `ends`, whichever
        is greater: a stalled fetcher does not see new records."""
        lags = {}
        for tp in self._get_active_partitions():
            known = [end for end in (self.highwater(tp), ends.get(tp)) if end is not None]
            if known:
                done = (self._new_offset(tp), self._read_offset.get(tp), self._passed.get(tp))
                lags[tp] = max(0, max(known) - max(offset or 0 for offset in done))
        return lags

    def taken(self) -> set[TP]:
        """The topic-partitions with records that were taken and are not acknowledged."""
        return {tp for tp, taken in self._in_flight.items() if taken.records}

    async def perform_seek(self) -> None:
        # Upstream seeks only partitions with a committed offset above 0: the others keep their read position.
        async with self._polling:
            self._in_flight.clear()
            self._passed.clear()
            self._acked.clear()
            await super().perform_seek()
            fresh = [TopicPartition(*tp) for tp in self._get_stream_partitions() if not self._committed_offset.get(tp)]
            if fresh:
                await self._thread.seek_to_beginning(*fresh)
            # From here on a position that is gone was reached before: to read on elsewhere would skip records.
            self._thread.reset_lost_positions(OffsetResetStrategy.NONE)

    @Service.task
    async def _commit_livelock_detector(self) -> None:
        """Replaced: upstream would report an error for every changelog partition, because they stay paused after
        recovery. The watchdog (health.py) detects missing progress."""

    def _get_stream_partitions(self) -> set[TP]:
        return {tp for tp in self.assignment() if not self._is_changelog_tp(tp)}

    async def wait_empty(self) -> None:
        # Upstream waits for the agents without a limit, and the rebalance with it: a batch that waits for a model
        # server would hold up the whole group. Here batches finish or are abandoned within a grace period, and the
        # completed ones are committed.
        await self.app.owner.quiesce()
        self._unacked_messages.clear()
        await self.commit_and_end_transactions()


class IdempotentProducer(Producer):
    """A producer with acks=all and idempotence: Faust has no setting for it outside `exactly_once`, and a retried send
    could be written twice or out of order."""

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"acks": "all", "enable_idempotence": True}


class BatchTransport(Transport):
    """Faust's aiokafka transport with this module's consumer and producer."""

    Consumer = BatchConsumer
    Producer = IdempotentProducer
