"""All workarounds for Faust, each a small subclass that names the defect it guards against.

Written against faust-streaming 0.15.3 only: `check_faust` rejects other versions, and a test compares the digest of all
source that is replaced or relied on (`PATCHED`) with that of 0.15.3.
docs/decisions/0002-streams-on-faust.md lists the upstream report of each defect and the test that shows it on a broker.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# Faust and aiokafka have no usable type annotations: their classes are Any.

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import faust
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from faust.agents.agent import Agent
from faust.app.base import App
from faust.serializers.schemas import Schema
from faust.streams import Stream
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.tables.table import Table
from faust.transport.consumer import Consumer as BaseConsumer
from faust.transport.consumer import ThreadDelegateConsumer
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Producer
from faust.types import TP
from mode import CrashingSupervisor, Service

from streams.runtime.exit_status import foreseen
from streams.runtime.faust.delivery import BatchSchema, BatchTransport, DeliveryLimits, NoAnswer, Owner
from streams.runtime.startup import TopicsWrong

log = logging.getLogger(__name__)

FAUST_VERSION = "0.15.3"

PATCHED: Mapping[str, Any] = {
    # replaced
    "Consumer._drain_messages": BaseConsumer._drain_messages,
    "Consumer._new_offset": BaseConsumer._new_offset,
    "Consumer.ack": BaseConsumer.ack,
    "Consumer.wait_empty": BaseConsumer.wait_empty,
    "Consumer._commit_livelock_detector": BaseConsumer._commit_livelock_detector.fun,
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
    "Service._crash": Service._crash,
    "Fetcher._proc_fetch_request": Fetcher._proc_fetch_request,
    "Fetcher._get_actions_per_node": Fetcher._get_actions_per_node,
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
    "GroupCoordinator._push_error_to_user": GroupCoordinator._push_error_to_user,
    "GroupCoordinator._coordination_routine": GroupCoordinator._coordination_routine,
    "AIOKafkaClient._md_synchronizer": AIOKafkaClient._md_synchronizer,
    "AIOKafkaClient._metadata_update": AIOKafkaClient._metadata_update,
    "Fetcher._fetch_requests_routine": Fetcher._fetch_requests_routine,
}


class WrongFaust(RuntimeError):
    """The installed Faust version is not the one that the guards were written for."""


def check_faust(version: str = str(faust.__version__)) -> None:
    """Raises WrongFaust for any version but FAUST_VERSION, whose defects the guards cover."""
    if version != FAUST_VERSION:
        raise WrongFaust(
            f"faust-streaming {version} is installed, but the guards in streams/runtime/faust were written for "
            f"{FAUST_VERSION}: install that version, or read the new source and update the guards and their digests"
        )


def patched_digests() -> dict[str, str]:
    """The sha256 (first 32 hex digits) of the source of each item in `PATCHED`."""
    return {name: hashlib.sha256(inspect.getsource(item).encode()).hexdigest()[:32] for name, item in PATCHED.items()}


class NotCopartitioned(TopicsWrong):
    """The input topics and the changelog of a stateful application are not co-partitioned."""


class SafeRecovery(Recovery):
    """Recovery in an order that delivers no record twice: changelog, restore, seek, then resume.

    Upstream resumes the stream partitions *before* it seeks them to the committed offsets, with the fetcher running:
    prefetched records are processed and then delivered again (up to a whole backlog, on each clean restart). It also
    takes a timeout of the seek for "service stopped" and leaves the worker idle forever, applies changelog records of
    unknown partitions to the wrong table, and keeps the last record written per key."""

    _epoch = 0

    async def on_rebalance(self, *args: Any, **kwargs: Any) -> None:
        self._epoch = self.app.epoch
        await super().on_rebalance(*args, **kwargs)

    def _overtaken(self) -> bool:
        # The generation changes only at the end of the next rebalance, but partitions are revoked at its beginning.
        return bool(self._epoch != self.app.epoch)

    @Service.task
    async def _restart_recovery(self) -> None:
        while not self.should_stop:
            if await self.wait_for_stopped(self.signal_recovery_start):
                break
            self.signal_recovery_start.clear()
            recovering = asyncio.ensure_future(self._recover())
            again = asyncio.ensure_future(self.signal_recovery_start.wait())
            stopped = asyncio.ensure_future(self._stopped.wait())
            try:
                await asyncio.wait({recovering, again, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if recovering.done():
                    self._look_at(recovering)
            finally:
                for task in (recovering, again, stopped):
                    task.cancel()
                await asyncio.gather(recovering, again, stopped, return_exceptions=True)

    def _look_at(self, recovering: "asyncio.Future[None]") -> None:
        # An exception in a service crashes all of Faust: it logs a traceback, and the consumer's loop is gone before it
        # has left the group. So the error goes to the owner, which ends in order and logs the reason.
        try:
            recovering.result()
        except Exception as error:
            if not foreseen(error):
                log.error("the assigned partitions could not be recovered", exc_info=error)
            self.app.owner.failed(error)

    @Service.task
    async def _slurp_changelogs(self) -> None:
        """Replaced: the changelog is not read through Faust's queues."""

    @Service.task
    async def _publish_stats(self) -> None:
        """Replaced: upstream reports on queues that are not used here."""

    async def _recover(self) -> None:
        app, consumer = self.app, self.app.consumer
        self.in_recovery = app.in_recovery = True
        await app.on_rebalance_complete.send()
        if self._overtaken():
            return
        streams = consumer._get_stream_partitions()
        partitions = sorted({tp.partition for tp in streams})
        self._check_copartitioned(streams, partitions)
        await app.owner.recover(partitions)
        if self._overtaken():
            return
        if streams:
            await self._seek(partitions)
        if self._overtaken():
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

    async def _seek(self, partitions: Sequence[int]) -> None:
        patience = self.app.conf.broker_request_timeout
        try:
            await asyncio.wait_for(self.app.consumer.perform_seek(), patience)
        except TimeoutError as error:
            raise NoAnswer(
                f"no answer within {patience:g} s about the committed offsets of partitions {partitions}: "
                "is the broker up?"
            ) from error

    def _check_copartitioned(self, streams: set[TP], partitions: Sequence[int]) -> None:
        if not self.tables.changelog_topics:
            return
        assigned = streams | self.active_tps
        for topic in {tp.topic for tp in assigned}:
            found = sorted(tp.partition for tp in assigned if tp.topic == topic)
            if found != list(partitions) or not self.active_tps:
                raise NotCopartitioned(
                    f"this worker was assigned partitions {list(partitions)} but {found} of {topic}: the input topics "
                    "and the changelog of an application with state must have the same partition count "
                    "(`tentalis topics apply`)"
                )


class SafeTableManager(TableManager):
    """A table manager with SafeRecovery that registers the tables without upstream's sleep of one second."""

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

    def __init__(
        self,
        *args: Any,
        owner: Owner,
        delivery_limits: DeliveryLimits,
        partition_counts: Mapping[str, int],
        **kwargs: Any,
    ) -> None:
        self.owner = owner
        self.delivery_limits = delivery_limits
        self.partition_counts = partition_counts
        self.epoch = 0
        """The number of rebalances that have begun."""
        super().__init__(*args, **kwargs)

    def _new_transport(self) -> Any:
        return BatchTransport(self.conf.broker_consumer, self)

    def _new_producer_transport(self) -> Any:
        return BatchTransport(self.conf.broker_producer, self)

    def _crash(self, reason: BaseException) -> None:
        super()._crash(reason)
        self.owner.crashed()

    async def _on_partitions_revoked(self, revoked: set[TP]) -> None:
        self.epoch += 1
        await super()._on_partitions_revoked(revoked)
        self.owner.revoked()


def build_app(
    app_id: str,
    topics: Sequence[str],
    table: str | None,
    *,
    owner: Owner,
    limits: DeliveryLimits,
    partitions: Mapping[str, int],
    submit: Callable[[Any], None],
    settings: Mapping[str, Any],
) -> GuardedApp:
    """The Faust application: one agent on all topics, which passes each event (a batch) to `submit` and never fails.

    Args:
        partitions: the partition count of each topic.
        submit: takes the event; acknowledges it with `event.ack()` when its batch is done or abandoned.
        settings: further Faust settings.
    """
    check_faust()
    app = GuardedApp(
        app_id,
        owner=owner,
        delivery_limits=limits,
        partition_counts=partitions,
        TableManager=SafeTableManager,
        # The default supervisor restarts an agent up to 100 times a second and skips the event that it raised on.
        agent_supervisor=CrashingSupervisor,
        # Faust's web server would serve table data on port 6066, and two workers on one machine would collide on it.
        web_enabled=False,
        # `tentalis topics apply` and ensure_changelog create the topics.
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
