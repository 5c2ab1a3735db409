"""Runs a `Processor` as a Faust application: one process, one consumer group, one exit code.

Exit codes:

- 0: stopped by a signal.
- 1: a write was not confirmed, Kafka is unreachable, or there was work but no progress. A restart helps.
- 3: a required topic is missing, or has a different number of partitions.
- 5: too many dead letters. A restart does not help.
- 6: the broker's ACLs forbid an operation. A restart does not help.
- 7: an input of this process (file, configuration, record) is damaged or does not fit. A restart does not help.
"""

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from schemas import topics
from schemas.wire.codec import SchemasUnavailable
from streams.runtime.delivery import NO_OFFSET, BatchRunner, DeliveryCounts, changelog_record
from streams.runtime.exit_status import ended
from streams.runtime.log_ends import LogEnds
from streams.runtime.processor import Aged, Bounded, Processor, StateUnreadable, Stepwise, Timed
from streams.runtime.progress import Place, StallDetector
from streams.runtime.queues import PartitionQueues, QueuedBatch
from streams.runtime.settings import StreamSettings, faust_settings, producer_settings
from streams.runtime.sink import KafkaSink
from streams.runtime.startup import TopicsWrong, check_topics
from streams.runtime.state import (
    ChangelogDiverged,
    ChangelogFold,
    StateStore,
    as_entries,
    ensure_changelog,
    read_changelog,
)
from streams.runtime.topic_guard import WAYS_ON, ChangelogReading, TopicGuard, fence_entry, sources_entry
from streams.runtime.topic_loss import GivenUp, TopicLoss
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.config import client_config
from tentalis.kafka.identity import PartitionsChanged, TopicLost, described
from tentalis.kafka.topology import written_topics
from tentalis.service import logs, tracing
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import RECOVERING, Health
from tentalis.service.lifecycle import Unmendable
from tentalis.service.ports import port_taken
from tentalis.service.security import aiokafka
from tentalis.service.version import app_version

if TYPE_CHECKING:
    from streams.runtime.rocksdb_store import DiskFold, DiskStore

__all__ = ["StreamSettings", "ensure_changelog", "run"]

log = logging.getLogger(__name__)

STOP_DEADLINE_S = 4.0
BEAT_S = 1.0
ENDS_S = 30.0
CAUSE_S = 5.0
PATIENCE_S = 30.0


def run(processor: Processor, settings: StreamSettings) -> int:
    """Runs until SIGTERM or SIGINT, or until something fails; returns the exit code. Logs to stderr."""
    logs.configure()
    for chatty in ("aiokafka", "faust", "mode", "streams.runtime.faust.guards", "streams.runtime.faust.delivery"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # The commit-age metric already reports commits that take longer than the commit interval.
    logging.getLogger("mode.timers").setLevel(logging.ERROR)
    tracing.configure(processor.app_id)
    try:
        partitions = check_topics(processor, client_config(settings.known))
    except KafkaException as error:
        log.critical(
            "%s cannot start: no Kafka answers at %s (%s)", processor.app_id, settings.bootstrap, error.args[0].str()
        )
        return ExitCode.UNREACHABLE
    except TopicsWrong as error:
        log.critical("%s cannot start: %s", processor.app_id, error)
        return ExitCode.DRIFT
    return asyncio.run(_Worker(processor, settings, partitions).main())


class _Worker:
    """Owns the partitions: connects Faust (`faust_guards`) with the partition queues, the batch runner, the store."""

    def __init__(self, processor: Processor, settings: StreamSettings, partitions: Mapping[str, int]) -> None:
        """`partitions`: the partition count of each input topic."""
        self._processor = processor
        self._partitions = partitions
        self._settings = settings
        self._changelog = None if processor.table is None else topics.changelog(processor.app_id, processor.table)
        self._store = self._make_store()
        self._counts = DeliveryCounts()
        self._ready = False
        self._recovering = False
        self._owned: tuple[int, ...] = ()
        self._restored: set[int] = set()
        self._steps = 0
        self._progress = StallDetector()
        self._log_ends = LogEnds(settings.known)
        self._topics = TopicGuard(
            settings.known,
            processor.app_id,
            processor.topics,
            self._changelog,
            lambda places: self._app.consumer.fetch_notes(places, PATIENCE_S),
            outputs=written_topics(processor.app_id),
        )
        self._ends: dict[Place, int] = {}
        self._given_up = False
        self._failure: BaseException | None = None
        self._over = asyncio.Event()
        """Set when this worker ends, for any reason."""
        self._faust_crashed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._app: Any = None
        self._metrics: Any = None
        self._sink = KafkaSink(producer_settings(settings), settings.delivery_timeout)
        self._letters = WrittenLetters(settings.known)
        self._runner = BatchRunner(
            processor,
            self._sink,
            store=self._store,
            changelog=self._changelog,
            limits=DeadLetterLimits.of(settings.dead_letters, processor.app_id),
            letters=self._letters,
            record_limit=settings.record_limit,
            version=app_version(),
            counts=self._counts,
        )
        self._queues = PartitionQueues(
            self._runner.run,
            lambda: self._runner.waiting,
            self.failed,
            settings.max_batch_records,
            settings.max_batch_bytes,
        )

    # -- the process

    async def main(self) -> int:
        settings, app_id = self._settings, self._processor.app_id
        (settings.state_dir / "faust").mkdir(parents=True, exist_ok=True)
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._over.set)
        # Imported modules live as long as the process. State consists of many objects without reference cycles: a
        # collection after every 700 new objects (the default) takes a tenth of the time of a batch.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        from streams.runtime import health
        from streams.runtime.faust.delivery import DeliveryLimits
        from streams.runtime.faust.guards import build_app

        self._app = build_app(
            self._processor.app_id,
            self._processor.topics,
            self._processor.table,
            owner=self,
            limits=DeliveryLimits(settings.max_batch_records, settings.max_batch_bytes),
            partitions=self._partitions,
            submit=self._submit,
            settings=faust_settings(self._processor.app_id, settings),
        )
        self._metrics = health.Metrics(
            self._processor,
            self._counts,
            lag=self._lag,
            commit_age=self._commit_age,
            waiting=lambda: len(self._runner.waiting),
            state_bytes=self._store.size,
            state_memory=self._store.memory,
        )
        watchdog = health.Watchdog(self._processor.app_id, self._counts, settings.stall_limit)
        site = None
        if settings.metrics_port is not None:
            try:
                site = await health.serve(
                    Health(self._metrics.exporter, self._not_ready), settings.metrics_host, settings.metrics_port
                )
            except OSError as error:
                what, option = f"server of health and metrics of {app_id}", "--metrics-port (0: a free one)"
                log.critical("%s", port_taken(settings.metrics_host, settings.metrics_port, what, error, option))
                return ExitCode.ERROR
        watchdog.start()
        background = [
            asyncio.create_task(self._beat(), name="beat"),
            asyncio.create_task(self._look_at_ends(), name="ends"),
        ]
        try:
            await self._until_over()
            await self._find_cause()
        finally:
            for task in background:
                task.cancel()
            await self._stop_app()
            self._sink.close()
            self._store.close()
            watchdog.stop()
            if site is not None:
                await site.cleanup()
        return self._exit_code()

    async def _until_over(self) -> None:
        starting = asyncio.create_task(self._app.start(), name="start")
        over = asyncio.create_task(self._over.wait())
        faust = asyncio.create_task(self._faust_crash())
        try:
            await asyncio.wait({starting, faust, over}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is not None:
                self._failure = self._failure or starting.exception()
                return
            await asyncio.wait({faust, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (starting, faust, over):
                task.cancel()

    async def _find_cause(self) -> None:
        """A lost topic shows first as a failed write or a foreign record: names it as the reason."""
        if self._failure is None or isinstance(self._failure, Unmendable | PartitionsChanged):
            return
        try:
            async with asyncio.timeout(CAUSE_S):
                while not await self._topics.check_running():  # noqa: ASYNC110
                    await asyncio.sleep(BEAT_S)
        except (TopicLost, PartitionsChanged) as cause:
            cause.__cause__ = self._failure
            self._failure = cause
        except TimeoutError:
            log.warning("the broker does not say if a topic was lost")

    async def _faust_crash(self) -> None:
        await self._faust_crashed.wait()
        self._failure = self._failure or self._app.crash_reason or RuntimeError("Faust crashed without a reason")

    async def _stop_app(self) -> None:
        """Commits completed batches and leaves the group."""
        self._over.set()
        self._ready = False
        stopping = asyncio.create_task(self._app.stop(), name="stop")
        await asyncio.wait({stopping}, timeout=STOP_DEADLINE_S)
        if not stopping.done():
            trouble = f"not done within {STOP_DEADLINE_S:g} s"
        elif stopping.cancelled():
            trouble = "cancelled"
        else:
            trouble = repr(stopping.exception()) if stopping.exception() else ""
        if trouble:
            # A crashed Faust has already ended its consumer thread, so an orderly stop is impossible. Uncommitted
            # records are delivered again, as after a kill.
            code = self._exit_code()
            log.warning("Faust did not stop in order (%s): the process exits without it", trouble)
            logging.shutdown()
            tracing.shutdown()
            os._exit(code)

    def _exit_code(self) -> int:
        return ended(self._processor.app_id, self._failure, self._settings.known, self._changelog)

    def crashed(self) -> None:
        # Faust's consumer runs in a separate thread, and crashes there. After the end there is no loop.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._faust_crashed.set)

    def failed(self, error: Exception) -> None:
        """Ends the worker in order: completed batches are committed, all others are not."""
        self._failure = self._failure or error
        self._over.set()

    async def _beat(self) -> None:
        """Once a second: updates the progress, sends ticks and submits due timeouts."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                if self._ready:
                    self._look_at_progress()
                    ticks = self._processor.ticks(self._owned)
                    if ticks:
                        await self._runner.send_ticks(ticks)
                    self._look_what_is_due()
            except SchemasUnavailable as error:
                log.warning("no ticks are sent until the schemas can be read: %s", error)
            except Exception as error:
                log.exception("sending ticks for partitions %s failed", self._owned)
                self.failed(error)
                return

    def _look_at_progress(self) -> None:
        counts = self._counts
        counts.progressed_at, counts.standing = self._progress.look(
            time.monotonic(),
            self._lag(),
            taken=self._app.consumer.taken(),
            excused=self._excused(),
            finished=counts.finished_at,
        )

    def _excused(self) -> set[int]:
        """Partitions that wait for an external service."""
        excused = set(self._runner.waiting)
        if isinstance(self._processor, Stepwise):
            before, self._steps = self._steps, self._processor.steps
            if self._steps != before:
                # External calls complete: a partition whose own calls did not may be queued behind the others'.
                excused.update(filter(self._processor.asking, self._owned))
        return excused

    async def _look_at_ends(self) -> None:
        """Asks the broker periodically for the end offsets of the owned partitions, independently of the fetcher, and
        for the ids of the topics."""
        while True:
            await asyncio.sleep(min(ENDS_S, self._settings.stall_limit / 4))
            places = [(topic, partition) for topic in self._processor.topics for partition in self._owned]
            try:
                self._ends.update(await self._log_ends.ask(places))
                await self._topics.check_running()
            except (TopicLost, PartitionsChanged) as error:
                self.failed(error)
                return
            except Exception as error:
                log.exception("the end offsets of partitions %s could not be requested", self._owned)
                self.failed(error)
                return

    def _look_what_is_due(self) -> None:
        if not isinstance(self._processor, Timed):
            return
        lags = self._lag()
        for partition in self._owned:
            at_end = {topic for (topic, number), behind in lags.items() if number == partition and not behind}
            if self._queues.idle(partition) and self._processor.due(partition, at_end):
                self._queues.submit(partition, QueuedBatch(()))

    def _not_ready(self) -> str | None:
        if self._recovering:
            return f"{RECOVERING} its state from the changelog"
        if not self._ready:
            return "its partitions are not assigned"
        return self._processor.full() if isinstance(self._processor, Bounded) else None

    def _lag(self) -> Mapping[tuple[str, int], int]:
        if not self._ready:
            return {}
        return {(tp.topic, tp.partition): behind for tp, behind in self._app.consumer.lag(self._ends).items()}

    def _commit_age(self) -> float:
        if not self._ready or not self._app.consumer.uncommitted():
            return 0.0
        return time.monotonic() - float(self._app.consumer.committed_at)

    # -- batches

    def _submit(self, event: Any) -> None:
        batch = event.value
        if not self._ready:
            event.ack()  # not done: its records are read again
            return

        def finished(done: bool) -> None:
            batch.done = done
            event.ack()

        self._queues.submit(event.message.partition, QueuedBatch(batch.records, finished))

    # -- partitions (faust_delivery.Owner)

    async def quiesce(self) -> None:
        # From here on no batch begins: nothing would wait for it, and timeouts would use the state of a batch that was
        # abandoned half-way.
        self._ready = False
        await self._queues.quiesce(self._settings.grace)

    def revoked(self) -> None:
        self._ready = False
        if self._over.is_set():
            return  # running batches still need their state, and no assignment follows
        self._owned = ()
        self._ends.clear()
        self._letters.forget()
        for partition in sorted(self._restored):
            self._processor.revoke(partition)
            self._store.drop(partition)
        self._restored.clear()

    async def recover(self, partitions: Sequence[int]) -> None:
        started = time.monotonic()
        self._recovering = True
        await self.quiesce()
        self.revoked()
        # Records sent by an abandoned batch may still be in flight to partitions that are assigned again.
        await self._sink.settled()
        await self._topics.look(self._partitions)
        self._given_up = False
        try:
            await self._restore(partitions)
        except (StateUnreadable, ChangelogDiverged) as error:
            if isinstance(self._store, StateStore):
                raise  # the state came from the changelog itself
            # Tried once: the state on disk is only a copy of the changelog.
            log.warning("%s: the state of all assigned partitions is rebuilt from %s", error, self._changelog)
            self.revoked()
            await self._restore(partitions, anew=True)
        await self._record_ids(partitions)
        self._metrics.recovery_seconds = time.monotonic() - started
        self._progressed()

    async def _restore(self, partitions: Sequence[int], *, anew: bool = False) -> None:
        if self._changelog is None or not isinstance(self._store, StateStore):
            # Before a state on disk is touched: it may be the only copy left.
            await self._look_for_losses(partitions, {})
        if self._changelog is not None:
            if not isinstance(self._store, StateStore):
                self._store.identity = await asyncio.to_thread(self._identity)
            folds: dict[int, ChangelogFold | DiskFold] = {}
            for partition in partitions:
                folds[partition] = self._store.open(partition, anew=anew)
                self._progressed()
            readings = {partition: ChangelogReading(fold) for partition, fold in folds.items()}
            await read_changelog(self._changelog, readings, self._client(), self._progressed)
            if await self._look_for_losses(partitions, readings, folds):
                await self._restore(partitions, anew=True)
                return
            self._metrics.recovered = sum(fold.read for fold in folds.values())
            for partition, fold in folds.items():
                self._runner.ends.begin(partition, fold.position)
                if self._topics.lacks_sources(readings[partition]):
                    await self._write_sources(partition)
                lost = fold.overwritten()
                if lost:
                    log.warning(
                        "%s[%d]: %d values were overwritten on the changelog by older ones written late; the newer "
                        "values are written again",
                        self._changelog,
                        partition,
                        len(lost),
                    )
                    end = await self._sink.send([changelog_record(self._changelog, partition, entry) for entry in lost])
                    if not isinstance(self._store, StateStore):
                        # Without this the database's position would stay behind, also for all later writes.
                        self._store.apply(partition, lost, end)
                    self._runner.ends.wrote(self._changelog, partition, len(lost), end)
                if isinstance(self._store, StateStore) and isinstance(fold, ChangelogFold):
                    self._store.load(partition, fold.state())
                self._progressed()
        for partition in partitions:
            self._restored.add(partition)
            try:
                self._runner.take_over(partition)
            except Exception as error:
                if anew or isinstance(self._store, StateStore):
                    raise
                raise StateUnreadable(f"the state on disk of partition {partition} is invalid: {error}") from error
            self._progressed()

    async def _look_for_losses(
        self,
        partitions: Sequence[int],
        readings: Mapping[int, ChangelogReading],
        folds: Mapping[int, "ChangelogFold | DiskFold"] = MappingProxyType({}),
    ) -> bool:
        """Compares the topics with what is recorded about them, so far as the changelog has been read.

        Returns:
            True if something was lost and is given up now, as `accept_loss` asks: the state must be read again.
        Raises:
            TopicLost: something is lost, and `accept_loss` is not set.
        """
        committed = await self._topics.committed(partitions)
        losses = await self._topics.losses(partitions, readings, committed)
        if not losses:
            return False
        left = {
            partition: fold.state() if isinstance(fold, ChangelogFold) else self._store.entries(partition)
            for partition, fold in folds.items()
        }
        loss = TopicLoss(
            self._settings.known, self._processor, self._changelog, losses, committed, left, self._progressed
        )
        if not self._settings.accept_loss or self._given_up:
            raise TopicLost(f"{await asyncio.to_thread(loss.described)}. {WAYS_ON}")
        if not readings and self._changelog is not None:
            return False  # given up when the rest of the state is read
        log.warning("%s: given up, as --accept-loss asks", described(losses))
        for partition in sorted({each.partition for each in losses}):
            given_up = await asyncio.to_thread(loss.give_up, partition)
            await self._sink.send([*given_up.outputs, *given_up.audit])
            if self._changelog is not None and not loss.keeps_state(partition):
                await self._write_anew(partition, given_up)
        await self._record_ids(sorted({each.partition for each in losses}))
        await self._app.consumer.recommit(loss.offsets())
        self._given_up = True
        return True

    async def _write_anew(self, partition: int, given_up: GivenUp) -> None:
        """Writes what is left of a partition's state behind a fence, and then the ids of the inputs."""
        entries = [
            fence_entry(given_up.reason),
            *as_entries(given_up.changes, {}, NO_OFFSET),
            sources_entry(self._topics.source_ids),
        ]
        changelog = str(self._changelog)
        last = await self._sink.send([changelog_record(changelog, partition, entry) for entry in entries])
        self._runner.ends.begin(partition, last + 1)

    async def _record_ids(self, partitions: Sequence[int]) -> None:
        """Records the ids of the topics on tentalis.topic-ids.v1, where it has others."""
        if records := self._topics.id_records(partitions):
            await self._sink.send(records)

    async def _write_sources(self, partition: int) -> None:
        """Writes the ids of the inputs to the changelog."""
        changelog, entry = str(self._changelog), sources_entry(self._topics.source_ids)
        last = await self._sink.send([changelog_record(changelog, partition, entry)])
        self._store.wrote_sources(partition, entry.value or b"", last)
        self._runner.ends.wrote(changelog, partition, 1, last)

    def _make_store(self) -> "StateStore | DiskStore":
        settings, processor = self._settings, self._processor
        if settings.state == "memory" or self._changelog is None:
            return StateStore()
        from streams.runtime.malloc import give_back_large_blocks
        from streams.runtime.rocksdb_store import DiskStore

        give_back_large_blocks()
        age = processor.age if isinstance(processor, Aged) else None
        return DiskStore(settings.state_dir / "rocksdb", age, settings.instance or "worker")

    def _identity(self) -> str:
        from streams.runtime.rocksdb_store import identity_of

        return identity_of(client_config(self._settings.known), str(self._changelog))

    def delivering(self, partitions: Sequence[int]) -> None:
        self._owned = tuple(partitions)
        self._progress.begin()
        self._recovering = False
        self._ready = not self._over.is_set()
        log.info(
            "%s owns partitions %s, recovered in %.2f s",
            self._processor.app_id,
            list(partitions),
            self._metrics.recovery_seconds,
        )

    def commit_note(self, topic: str, partition: int) -> str:
        return self._topics.note(topic, self._runner.ends.of(partition))

    def _progressed(self) -> None:
        self._counts.progressed_at = time.monotonic()

    def _client(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self._settings.bootstrap.split(","),
            "client_id": f"{self._processor.app_id}-recovery",
            **aiokafka(self._settings.security),
        }
