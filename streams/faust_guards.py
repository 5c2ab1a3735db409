"""Every workaround for Faust there is, each a small subclass that names the defect it guards against.

Written against faust-streaming 0.15.3 and no other version: `check_faust` refuses another, and a test compares the
source of everything that is replaced or relied on (`PATCHED`) with what was read when this was written.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# Faust and aiokafka have no types that could be followed: their classes are Any.

import asyncio
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import faust
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition
from faust.agents.agent import Agent
from faust.app.base import App
from faust.serializers.schemas import Schema
from faust.streams import Stream
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.tables.table import Table
from faust.transport.consumer import Consumer as BaseConsumer
from faust.transport.consumer import ThreadDelegateConsumer
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Producer, Transport
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import CrashingSupervisor, Service

from streams.processor import LogRecord

FAUST_VERSION = "0.15.3"

PATCHED: Mapping[str, Any] = {
    # replaced
    "Consumer._drain_messages": BaseConsumer._drain_messages,
    "Consumer._new_offset": BaseConsumer._new_offset,
    "Consumer.ack": BaseConsumer.ack,
    "Consumer.wait_empty": BaseConsumer.wait_empty,
    "Recovery._restart_recovery": Recovery._restart_recovery.fun,
    "Recovery._slurp_changelogs": Recovery._slurp_changelogs.fun,
    "Recovery._publish_stats": Recovery._publish_stats.fun,
    "Recovery.on_recovery_completed": Recovery.on_recovery_completed,
    "TableManager.recovery": TableManager.recovery.fget,
    "TableManager.on_start": TableManager.on_start,
    "Producer._settings_extra": Producer._settings_extra,
    "Consumer._commit_offsets": BaseConsumer._commit_offsets,
    "Consumer.perform_seek": BaseConsumer.perform_seek,
    # extended or relied on
    "AIOKafkaConsumerThread._create_worker_consumer": AIOKafkaConsumerThread._create_worker_consumer,
    "AIOKafkaConsumerThread._fetch_records": AIOKafkaConsumerThread._fetch_records,
    "AIOKafkaConsumerThread._commit": AIOKafkaConsumerThread._commit,
    "ThreadDelegateConsumer.threadsafe_partitions_assigned": ThreadDelegateConsumer.threadsafe_partitions_assigned,
    "Consumer._filter_committable_offsets": BaseConsumer._filter_committable_offsets,
    "Consumer._should_commit": BaseConsumer._should_commit,
    "Recovery.on_rebalance": Recovery.on_rebalance,
    "App._on_partitions_revoked": App._on_partitions_revoked,
    "App._on_partitions_assigned": App._on_partitions_assigned,
    "App._stop_consumer": App._stop_consumer,
    "App._new_transport": App._new_transport,
    "Stream._py_aiter": Stream._py_aiter,
    "Agent._execute_actor": Agent._execute_actor,
    "Schema.compile": Schema.compile,
    "GroupCoordinator.reset_generation": GroupCoordinator.reset_generation,
}


POLL_S = 0.25
"""Seconds that a poll waits for records: also what a rebalance may have to wait for it."""
BUSY_POLL_S = 0.05
"""The same while some partitions are busy, and may have room again any moment."""


class WrongFaust(RuntimeError):
    """Another Faust than the one the guards were written for."""


def check_faust(version: str = str(faust.__version__)) -> None:
    """Raises WrongFaust for a version whose defects nobody has measured."""
    if version != FAUST_VERSION:
        raise WrongFaust(
            f"faust-streaming {version} is installed, but the guards in streams/faust_guards.py were written for "
            f"{FAUST_VERSION}: install that version, or read the new source, update the guards and their digests"
        )


def patched_digests() -> dict[str, str]:
    """sha256 (the first 32 hex digits) of the source of everything in `PATCHED`."""
    return {name: hashlib.sha256(inspect.getsource(item).encode()).hexdigest()[:32] for name, item in PATCHED.items()}


@dataclass(slots=True, eq=False)
class Batch:
    """What the agent gets as one event: consecutive records of one partition. `done` after its effects are
    confirmed."""

    records: Sequence[LogRecord]
    next_offset: int
    done: bool = False


class Fenced(KafkaError):
    """Another worker runs under the name of this one (static membership)."""


class NotCopartitioned(RuntimeError):
    """Input topics and changelog of a stateful application do not lie side by side."""


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
    """Bounds of batched delivery, per topic-partition."""

    max_batch_records: int
    max_batch_bytes: int
    max_in_flight: int = 2
    """Batches taken from the fetcher and not yet acknowledged: one being carried out, one waiting."""


class BatchSchema(Schema):
    """Passes the batch through. Faust acknowledges a message whose decoding fails and throws into the agent (a silent
    loss and a restart); here nothing is decoded before the processor, which answers with dead letters."""

    def loads_key(self, app: Any, message: Any, **kwargs: Any) -> None:
        return None

    def loads_value(self, app: Any, message: Any, **kwargs: Any) -> Batch:
        return cast(Batch, message.value)


def log_record(record: Any) -> LogRecord:
    """An aiokafka record as the processor sees it."""
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
        consumer = super()._create_worker_consumer(transport)
        # Upstream waits 1500 ms on an idle fetch, and aiokafka sends one fetch per broker at a time: a partition that
        # becomes fetchable again in between would wait that long.
        consumer._fetch_max_wait_ms = 250
        return consumer

    async def on_start(self) -> None:
        await super().on_start()
        if self.app.conf.consumer_group_instance_id:
            self._end_when_fenced(self._ensure_consumer()._coordinator)

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
            self.parent_loop.call_soon_threadsafe(self.app.owner.failed, error)
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
        self._in_flight: dict[TP, int] = {}
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
                most = self.app.delivery_limits.max_in_flight
                ready = {tp for tp in active if self._in_flight.get(tp, 0) < most}
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
                for batch in split([log_record(record) for record in records], self.app.delivery_limits):
                    if not self.flow_active or generation != self.app.consumer_generation_id:
                        return
                    await self._deliver(TP(*tp), batch, generation)

    async def _deliver(self, tp: TP, records: Sequence[LogRecord], generation: int) -> None:
        last = records[-1]
        message = ConsumerMessage(
            tp.topic,
            tp.partition,
            last.offset,
            last.timestamp / 1000.0,
            0,
            None,
            None,
            Batch(records, last.offset + 1),
            None,
            0,
            0,
            tp=tp,
            generation_id=generation,
        )
        self._in_flight[tp] = self._in_flight.get(tp, 0) + 1
        await self.wait_first(self.callback(message), self.suspend_flow.wait())

    def ack(self, message: Any) -> bool:
        # Upstream acknowledges whatever leaves the stream: events that were skipped because the generation changed, and
        # events whose agent raised. Here only a batch whose effects are confirmed counts.
        self._unacked_messages.discard(message)
        message.acked = True
        if message.generation_id != self.app.consumer_generation_id:
            return False
        self._in_flight[message.tp] = self._in_flight.get(message.tp, 1) - 1
        self._room.set()
        batch: Batch = message.value
        if batch.done:
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

    def lag(self) -> dict[TP, int]:
        """Records per owned partition that are on the log and not acknowledged, as far as the last fetch knew."""
        lags = {}
        for tp in self._get_active_partitions():
            end = self.highwater(tp)
            offset = self._new_offset(tp)
            if offset is None:
                offset = self._read_offset.get(tp)
            if end is not None:
                lags[tp] = max(0, end - (offset or 0))
        return lags

    async def perform_seek(self) -> None:
        # Upstream seeks only partitions with a committed offset above 0: the others stay wherever they were read to.
        async with self._polling:
            self._in_flight.clear()
            self._acked.clear()
            await super().perform_seek()
            fresh = [TopicPartition(*tp) for tp in self._get_stream_partitions() if not self._committed_offset.get(tp)]
            if fresh:
                await self._thread.seek_to_beginning(*fresh)

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


class SafeRecovery(Recovery):
    """Recovery in an order that delivers nothing twice: changelog, seek, restore, then resume.

    Upstream resumes the stream partitions *before* it seeks them to the committed offsets, with the fetcher running:
    what was prefetched is processed and then delivered again (up to every record of a backlog, on each clean restart).
    It also takes a time-out of the seek for "service stopped" and leaves the worker idle for good, applies changelog
    records of unknown partitions to the wrong table, and keeps the last record written per key."""

    @Service.task
    async def _restart_recovery(self) -> None:
        while not self.should_stop:
            if await self.wait_for_stopped(self.signal_recovery_start):
                break
            self.signal_recovery_start.clear()
            generation = self._generation_id
            recovering = asyncio.ensure_future(self._recover(generation))
            again = asyncio.ensure_future(self.signal_recovery_start.wait())
            stopped = asyncio.ensure_future(self._stopped.wait())
            try:
                await asyncio.wait({recovering, again, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if recovering.done():
                    recovering.result()
            finally:
                for task in (recovering, again, stopped):
                    task.cancel()
                await asyncio.gather(recovering, again, stopped, return_exceptions=True)

    @Service.task
    async def _slurp_changelogs(self) -> None:
        """Replaced: the changelog is not read through Faust's queues."""

    @Service.task
    async def _publish_stats(self) -> None:
        """Replaced: it reports on the queues that are not used."""

    async def _recover(self, generation: int) -> None:
        app, consumer = self.app, self.app.consumer
        self.in_recovery = app.in_recovery = True
        await app.on_rebalance_complete.send()
        streams = consumer._get_stream_partitions()
        partitions = sorted({tp.partition for tp in streams})
        self._check_copartitioned(streams, partitions)
        await app.owner.recover(partitions)
        if app.consumer_generation_id != generation:
            return
        if streams:
            await asyncio.wait_for(consumer.perform_seek(), app.conf.broker_request_timeout)
        if app.consumer_generation_id != generation:
            return
        self.in_recovery = app.in_recovery = False
        consumer.resume_partitions(streams)
        self.completed.set()
        app.owner.delivering(partitions)
        app.flow_control.resume()
        consumer.resume_flow()
        await app._fetcher.maybe_start()
        self.tables.on_actives_ready()
        self.tables.on_standbys_ready()
        app.on_rebalance_end()

    def _check_copartitioned(self, streams: set[TP], partitions: Sequence[int]) -> None:
        if not self.tables.changelog_topics:
            return
        assigned = streams | self.active_tps
        for topic in {tp.topic for tp in assigned}:
            found = sorted(tp.partition for tp in assigned if tp.topic == topic)
            if found != list(partitions) or not self.active_tps:
                raise NotCopartitioned(
                    f"this worker was given partitions {list(partitions)} but {found} of {topic}: input topics and "
                    "changelog of an application with state must have the same partition count "
                    "(`tentalis topics apply`)"
                )


class SafeTableManager(TableManager):
    """Uses SafeRecovery, and does not sleep a second before it registers the tables."""

    _recovery: Any = None

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = SafeRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery

    async def on_start(self) -> None:
        await self._update_channels()
        await self.recovery.start()


class GuardedApp(App):
    """The Faust application of a processor."""

    def __init__(self, *args: Any, owner: Owner, delivery_limits: DeliveryLimits, **kwargs: Any) -> None:
        self.owner = owner
        self.delivery_limits = delivery_limits
        super().__init__(*args, **kwargs)

    def _new_transport(self) -> Any:
        return BatchTransport(self.conf.broker_consumer, self)

    def _new_producer_transport(self) -> Any:
        return BatchTransport(self.conf.broker_producer, self)

    async def _on_partitions_revoked(self, revoked: set[TP]) -> None:
        await super()._on_partitions_revoked(revoked)
        self.owner.revoked()


def build_app(
    app_id: str,
    topics: Sequence[str],
    table: str | None,
    *,
    owner: Owner,
    limits: DeliveryLimits,
    submit: Callable[[Any], None],
    settings: Mapping[str, Any],
) -> GuardedApp:
    """The Faust application: one agent on all topics, which hands each event (a batch) to `submit` and never fails.

    Args:
        submit: takes the event; acknowledges it with `event.ack()` when its batch is done or given up.
        settings: further Faust settings.
    """
    check_faust()
    app = GuardedApp(
        app_id,
        owner=owner,
        delivery_limits=limits,
        TableManager=SafeTableManager,
        # The default restarts an agent up to a hundred times a second, skipping the event that it raised on.
        agent_supervisor=CrashingSupervisor,
        # aiohttp on port 6066, which serves table data; two workers on one machine collide on it.
        web_enabled=False,
        # Topics exist already: `tentalis topics apply`, ensure_changelog.
        topic_allow_declare=False,
        # `latest` with tables never finishes recovery (#651).
        consumer_auto_offset_reset="earliest",
        topic_disable_leader=True,
        # exactly_once commits outside its transaction (#136, #177, #323, #440, #517).
        processing_guarantee="at_least_once",
        table_standby_replicas=0,
        store="memory://",
        autodiscover=False,
        **settings,
    )
    if table is not None:
        app.tables.add(Table(app, name=table, key_type=bytes, value_type=bytes))
    channel = app.topic(*topics, schema=BatchSchema(), internal=False)

    async def deliver(stream: Any) -> None:
        # noack: the event is acknowledged when its batch is done, not when the agent takes the next one.
        async for event in stream.noack().events():
            submit(event)

    app.agent(channel, name=f"{app_id}-deliver", concurrency=1)(deliver)
    return app
