"""Batched delivery for Faust: its consumer, conductor and agents stay, but one message is a batch of records.

The other workarounds, and what all of them were written against, are in `streams.faust_guards`.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# Faust and aiokafka have no types that could be followed: their classes are Any.

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition
from faust.serializers.schemas import Schema
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Producer, Transport
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import Service

from schemas.place import Place
from streams import header_names
from streams.processor import LogRecord
from tentalis.service import Unmendable

POLL_S = 0.25
"""Seconds that a poll waits for records: also what a rebalance may have to wait for it."""
BUSY_POLL_S = 0.05
"""The same while some partitions are busy, and may have room again any moment."""
LOG_APPEND_TIME = 1
"""`timestamp_type` of an aiokafka record that has the time of its append, by the broker's clock."""


@dataclass(slots=True, eq=False)
class Batch:
    """What the agent gets as one event: consecutive records of one partition, `size` bytes of values. `done` after its
    effects are confirmed."""

    records: Sequence[LogRecord]
    next_offset: int
    size: int
    done: bool = False


class Fenced(KafkaError):
    """Another worker runs under the name of this one (static membership)."""


class GroupLost(Exception):
    """The coordinator answered with an error after which aiokafka takes no part in the group any more."""


class NotAppendTime(Unmendable):
    """A record with the time of its producer's clock."""


class NoAnswer(Exception):
    """The broker did not say in time where a partition was committed: it is away, or too slow."""


class Owner(Protocol):
    """Who is told what happens to partitions; all calls come from the application's event loop."""

    def failed(self, error: Exception) -> None:
        """This worker cannot go on and must end."""

    async def quiesce(self) -> None:
        """Finish or give up every batch: partitions are about to go."""

    def revoked(self) -> None:
        """No partition is owned any more."""

    async def recover(self, partitions: Sequence[int]) -> None:
        """Bring the state of these partitions into place; nothing of them is delivered before this returns."""

    def delivering(self, partitions: Sequence[int]) -> None:
        """The partitions are recovered and their records come."""


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """Bounds of batched delivery, per topic-partition. No more is taken from the fetcher while what was taken and is
    not yet acknowledged is more than one batch: one is carried out, and the next one grows."""

    max_batch_records: int
    max_batch_bytes: int


@dataclass(slots=True)
class InFlight:
    """What was taken of a topic-partition and is not yet acknowledged."""

    records: int = 0
    bytes: int = 0

    def add(self, batch: Batch, sign: int = 1) -> None:
        """It is taken; with -1, it is acknowledged."""
        self.records += sign * len(batch.records)
        self.bytes += sign * batch.size

    def within(self, limits: DeliveryLimits) -> bool:
        """Whether more may be taken."""
        return self.records <= limits.max_batch_records and self.bytes <= limits.max_batch_bytes


class BatchSchema(Schema):
    """Passes the batch through. Faust acknowledges a message whose decoding fails and throws into the agent (a silent
    loss and a restart); here nothing is decoded before the processor, which answers with dead letters."""

    def loads_key(self, app: Any, message: Any, **kwargs: Any) -> None:
        return None

    def loads_value(self, app: Any, message: Any, **kwargs: Any) -> Batch:
        return cast(Batch, message.value)


def log_record(record: Any, partitions: int) -> LogRecord:
    """An aiokafka record as the processor sees it; `partitions`: how many its topic has.

    Raises:
        NotAppendTime: what is late and what is over would depend on the clock of whoever produced it.
    """
    if record.timestamp_type != LOG_APPEND_TIME:
        raise NotAppendTime(
            f"{Place(record.topic, record.partition, record.offset)} has the time of its producer's clock "
            "(CreateTime), not of its append: one wrong clock would end every open wait of the partition. "
            f"`tentalis topics apply` sets message.timestamp.type=LogAppendTime on {record.topic}, for what comes from "
            "then on. What lies there keeps its time: produce it again and move the group past it "
            "(kafka-consumer-groups.sh --reset-offsets), or delete the topic before if it is of no use"
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
    """Cuts a run of records into batches within the bounds; a record larger than the bound is a batch of its own."""
    batches: list[list[LogRecord]] = []
    size = 0
    for record in records:
        size += len(record.value)
        if not batches or size > limits.max_batch_bytes or len(batches[-1]) >= limits.max_batch_records:
            batches.append([])
            size = len(record.value)
        batches[-1].append(record)
    return batches


class GuardedConsumerThread(AIOKafkaConsumerThread):
    """aiokafka's consumer in its thread, with two switches that Faust does not set."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        header_names.install()
        consumer = super()._create_worker_consumer(transport)
        # Upstream waits 1500 ms on an idle fetch, and aiokafka sends one fetch per broker at a time: a partition that
        # becomes fetchable again in between would wait that long.
        consumer._fetch_max_wait_ms = 250
        return consumer

    async def on_start(self) -> None:
        await super().on_start()
        coordinator = self._ensure_consumer()._coordinator
        self._end_when_lost(coordinator)
        if self.app.conf.consumer_group_instance_id:
            self._end_when_fenced(coordinator)

    def _end(self, error: Exception) -> None:
        self.parent_loop.call_soon_threadsafe(self.app.owner.failed, error)

    def _end_when_lost(self, coordinator: Any) -> None:
        # aiokafka keeps such an error for whoever polls next, and its coordination stands still until then. In a
        # rebalance Faust polls nothing: the worker would stay, out of the group, for good.
        push = coordinator._push_error_to_user

        def lost(cause: BaseException) -> None:
            text = f"the coordinator of group {coordinator.group_id} answered with {cause!r}: ending, to join it anew"
            error = GroupLost(text)
            error.__cause__ = cause
            self._end(error)

        def push_error_to_user(cause: BaseException) -> Any:
            if not isinstance(cause, Fenced):
                lost(cause)
            return push(cause)

        def coordination_ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (cause := task.exception()) is not None:
                lost(cause)

        coordinator._push_error_to_user = push_error_to_user
        coordinator._coordination_task.add_done_callback(coordination_ended)

    def _end_when_fenced(self, coordinator: Any) -> None:
        # A static member whose id the broker no longer knows was replaced by a successor of the same name. aiokafka
        # joins again, which throws the successor out, which joins again ... The one that was replaced has to end
        # instead.
        instance, forget = self.app.conf.consumer_group_instance_id, coordinator.reset_generation

        def reset_generation() -> None:
            if coordinator._closing.done():
                forget()
                return
            error = Fenced(
                f"the group {coordinator.group_id} has another member under the name {instance!r}, or this one was "
                "silent for longer than the session timeout: ending. Give each worker an instance name of its own"
            )
            self._end(error)
            # Of the heartbeat that meets it nobody asks how it ended: the worker has said so by now.
            if (task := asyncio.current_task()) is not None:
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise error

        coordinator.reset_generation = reset_generation

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        # The changelog is read by a reader of its own (state.read_changelog). Faust pauses only its own view of a
        # partition; aiokafka would go on prefetching the changelog for nobody.
        changelogs = {TopicPartition(*tp) for tp in assigned if self.consumer._is_changelog_tp(tp)}
        if changelogs:
            self._ensure_consumer().pause(*changelogs)
        await super().on_partitions_assigned(assigned, generation_id)


class BatchConsumer(Consumer):
    """Batched delivery: one message per partition and poll instead of one per record, and offsets that are committed
    only when the effects of everything before them are confirmed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: defaultdict[TP, InFlight] = defaultdict(InFlight)
        self._passed: dict[TP, int] = {}
        self._room = asyncio.Event()
        self._polling = asyncio.Lock()
        self.committed_at = time.monotonic()

    def _new_consumer_thread(self) -> GuardedConsumerThread:
        return GuardedConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _drain_messages(self, fetcher: Any) -> None:
        # Upstream makes one message, two tasks and one queue entry of every record: 5k records/s. It also tracks "gaps"
        # of offsets to find out what may be committed, wrongly (see _new_offset).
        try:
            while not (self.should_stop or fetcher.should_stop):
                if not self.flow_active:
                    await self.wait(self.can_resume_flow)
                    continue
                self._room.clear()
                active = self._get_active_partitions()
                # What is left with the fetcher holds up all partitions of that broker: aiokafka fetches nothing for
                # 100 ms then. So everything is taken at once, and a lane makes one batch of what waits.
                ready = {tp for tp in active if self._in_flight[tp].within(self.app.delivery_limits)}
                if ready:
                    await self._poll(ready, POLL_S if ready == active else BUSY_POLL_S)
                else:
                    # An empty set would mean "all partitions" to aiokafka.
                    await self.wait_for_stopped(self._room.wait(), timeout=POLL_S)
        except self.consumer_stopped_errors:
            if not self.app.should_stop:
                raise
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise
        except NotAppendTime as error:
            # Nothing is polled any more: what lies behind it must not be delivered, or its offset would be committed.
            self.app.owner.failed(error)

    async def _poll(self, ready: set[TP], seconds: float) -> None:
        # Upstream lets a poll outlive a rebalance and drops what it returns, because the generation is another by then;
        # but if the seek was already done, the position is now behind records that nobody has seen: they are lost. So
        # a seek waits for the poll (see perform_seek), and what is dropped here is read again.
        async with self._polling:
            if not self.flow_active:
                return
            generation = self.app.consumer_generation_id
            fetched = await self._getmany(ready, timeout=seconds)
            for tp, records in fetched.items():
                count = self.app.partition_counts[tp.topic]
                for batch in split([log_record(record, count) for record in records], self.app.delivery_limits):
                    if not self.flow_active or generation != self.app.consumer_generation_id:
                        return
                    await self._deliver(TP(*tp), batch, generation)
            self._note_passed(ready)

    def _note_passed(self, polled: set[TP]) -> None:
        # Offsets of transactions' markers and of what retention removed are passed over and never acknowledged: they
        # would be a lag that nobody can work off.
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
        # Upstream acknowledges whatever leaves the stream: events that were skipped because the generation changed, and
        # events whose agent raised. Here only a batch whose effects are confirmed counts.
        self._unacked_messages.discard(message)
        message.acked = True
        if message.generation_id != self.app.consumer_generation_id:
            return False
        batch: Batch = message.value
        if batch.done:  # else it stays in flight: it is read again after a seek, or the worker ends
            self._in_flight[message.tp].add(batch, -1)
            self._room.set()
            self._acked[message.tp] = [batch.next_offset]
        return batch.done

    def _new_offset(self, tp: TP) -> int | None:
        # Upstream's check for a gap at the head is off by one and commits past an unprocessed event (#606, PR #707).
        # Batches of a partition are acknowledged in order, so the last acknowledged one says it all, on compacted
        # topics too (#378).
        acked = self._acked.get(tp)
        return acked[-1] if acked else None

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        # Upstream takes a failed commit for done, and tries again only when a later offset is acknowledged (#611).
        before = {tp: self._committed_offset[tp] for tp in offsets}
        committed = bool(await super()._commit_offsets(offsets, start_new_transaction))
        if committed:
            self.committed_at = time.monotonic()
        else:
            self._committed_offset.update(before)
        return committed

    def uncommitted(self) -> bool:
        """Whether anything acknowledged waits for its commit."""
        return any(self._should_commit(tp, acked[-1]) for tp, acked in self._acked.items() if acked)

    def lag(self, ends: Mapping[tuple[str, int], int]) -> dict[TP, int]:
        """Records per owned partition that are on the log and not acknowledged, as far as the last fetch knew or `ends`
        say, whichever is more: a fetcher that stands still hears of nothing new."""
        lags = {}
        for tp in self._get_active_partitions():
            known = [end for end in (self.highwater(tp), ends.get(tp)) if end is not None]
            if known:
                done = (self._new_offset(tp), self._read_offset.get(tp), self._passed.get(tp))
                lags[tp] = max(0, max(known) - max(offset or 0 for offset in done))
        return lags

    def taken(self) -> set[TP]:
        """The partitions with records that were taken and are not acknowledged."""
        return {tp for tp, taken in self._in_flight.items() if taken.records}

    async def perform_seek(self) -> None:
        # Upstream seeks only partitions with a committed offset above 0: the others stay wherever they were read to.
        async with self._polling:
            self._in_flight.clear()
            self._passed.clear()
            self._acked.clear()
            await super().perform_seek()
            fresh = [TopicPartition(*tp) for tp in self._get_stream_partitions() if not self._committed_offset.get(tp)]
            if fresh:
                await self._thread.seek_to_beginning(*fresh)

    @Service.task
    async def _commit_livelock_detector(self) -> None:
        """Replaced: it would report an error for every changelog partition, which are paused for good after recovery.
        Whether there is progress is the watchdog's to judge (health.py)."""

    def _get_stream_partitions(self) -> set[TP]:
        return {tp for tp in self.assignment() if not self._is_changelog_tp(tp)}

    async def wait_empty(self) -> None:
        # Upstream waits without end for agents to finish, and a rebalance with it: a batch that waits for a model
        # server would hold up the whole group. Ours are finished or given up within a grace period, then what is done
        # is committed.
        await self.app.owner.quiesce()
        self._unacked_messages.clear()
        await self.commit_and_end_transactions()


class IdempotentProducer(Producer):
    """acks=all with idempotence: Faust has no setting for it outside `exactly_once`, and a retried send could be
    written twice or out of order."""

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"acks": "all", "enable_idempotence": True}


class BatchTransport(Transport):
    """aiokafka, with our consumer and producer."""

    Consumer = BatchConsumer
    Producer = IdempotentProducer
