"""Runs a `Processor` as a Faust application: one process, one consumer group, one exit code.

Exit codes: 0 stopped by a signal; 1 something could not be confirmed, Kafka is away, or no progress although there is
something to do (start again); 3 a topic that it needs is missing, or has another number of partitions; 5 too many dead
letters (starting again will not help); 6 the broker's ACLs forbid something (nor here); 7 something that this process
was given is damaged or does not fit (nor here).
"""

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from schemas import topics
from schemas.codec import SchemasUnavailable
from streams.delivery import BatchRunner, Counts, changelog_record
from streams.ending import EXIT_CRASHED, EXIT_DRIFT, EXIT_UNREACHABLE, ended
from streams.lanes import Job, Lanes
from streams.log_ends import LogEnds
from streams.processor import Aged, Bounded, Processor, StateUnreadable, Stepwise, Timed
from streams.progress import Place, Progress
from streams.settings import StreamSettings, faust_settings, producer_settings
from streams.sink import KafkaSink
from streams.startup import TopicsWrong, check_topics
from streams.state import Diverged, Fold, StateStore, ensure_changelog, read_changelog
from tentalis import logs, tracing
from tentalis.dlq.context import app_version
from tentalis.dlq.limits import DeadLimits
from tentalis.health import Health
from tentalis.kafka import client_config
from tentalis.security import aiokafka

if TYPE_CHECKING:
    from streams.disk import DiskFold, DiskStore

__all__ = ["StreamSettings", "ensure_changelog", "run"]

log = logging.getLogger(__name__)

STOP_DEADLINE_S = 4.0
BEAT_S = 1.0
ENDS_S = 30.0


def run(processor: Processor, settings: StreamSettings) -> int:
    """Runs until SIGTERM or SIGINT, or until something fails; returns the exit code. Logs to stderr."""
    logs.configure()
    for chatty in ("aiokafka", "faust", "mode", "streams.faust_guards", "streams.faust_delivery"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # A commit that takes longer than the time between two is said by the metric of its age.
    logging.getLogger("mode.timers").setLevel(logging.ERROR)
    tracing.configure(processor.app_id)
    try:
        partitions = check_topics(processor, client_config(settings.known))
    except KafkaException as error:
        log.critical(
            "%s cannot start: no Kafka answers at %s (%s)", processor.app_id, settings.bootstrap, error.args[0].str()
        )
        return EXIT_UNREACHABLE
    except TopicsWrong as error:
        log.critical("%s cannot start: %s", processor.app_id, error)
        return EXIT_DRIFT
    return asyncio.run(_Worker(processor, settings, partitions).main())


class _Worker:
    """The owner of the partitions: between Faust (`faust_guards`) on one side and lanes, runner and store on the
    other."""

    def __init__(self, processor: Processor, settings: StreamSettings, partitions: Mapping[str, int]) -> None:
        """`partitions`: how many its input topics have."""
        self._processor = processor
        self._partitions = partitions
        self._settings = settings
        self._changelog = None if processor.table is None else topics.changelog(processor.app_id, processor.table)
        self._store = self._make_store()
        self._counts = Counts()
        self._ready = False
        self._owned: tuple[int, ...] = ()
        self._restored: set[int] = set()
        self._steps = 0
        self._progress = Progress()
        self._log_ends = LogEnds(settings.known)
        self._ends: dict[Place, int] = {}
        self._failure: BaseException | None = None
        self._over = asyncio.Event()
        """This worker ends, whatever for."""
        self._app: Any = None
        self._metrics: Any = None
        self._sink = KafkaSink(producer_settings(settings), settings.delivery_timeout)
        self._runner = BatchRunner(
            processor,
            self._sink,
            store=self._store,
            changelog=self._changelog,
            limits=DeadLimits(settings.dead_run, settings.dead_ratio, settings.dead_window),
            record_limit=settings.record_limit,
            version=app_version(),
            counts=self._counts,
        )
        self._lanes = Lanes(
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
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        # Whatever is imported by now stays. State is many objects and no cycles: looking for some after every 700 new
        # objects takes a tenth of the time of a batch.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        from streams import health
        from streams.faust_delivery import DeliveryLimits
        from streams.faust_guards import build_app

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
                log.critical(
                    "%s cannot serve metrics on port %d: %s. Choose a free port", app_id, settings.metrics_port, error
                )
                return EXIT_CRASHED
        watchdog.start()
        background = [
            asyncio.create_task(self._beat(), name="beat"),
            asyncio.create_task(self._look_at_ends(), name="ends"),
        ]
        try:
            await self._until_over()
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

    async def _faust_crash(self) -> None:
        # Polled: Faust's consumer lives in a thread of its own, and sets the flag there without waking this loop.
        while not self._app.crashed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._failure = self._failure or self._app.crash_reason or RuntimeError("Faust crashed without a reason")

    async def _stop_app(self) -> None:
        """Commits what is done and leaves the group."""
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
            # A crashed Faust has ended its consumer thread already, and cannot stop in order. What was not committed
            # comes again, as after a kill.
            code = self._exit_code()
            log.warning("Faust was left behind without an orderly stop: %s", trouble)
            logging.shutdown()
            tracing.shutdown()
            os._exit(code)

    def _exit_code(self) -> int:
        return ended(self._processor.app_id, self._failure, self._settings.known, self._changelog)

    def failed(self, error: Exception) -> None:
        """Ends the worker in order: what is done is committed, nothing else is."""
        self._failure = self._failure or error
        self._over.set()

    async def _beat(self) -> None:
        """Once a second: ticks, and whether there is anything to make progress on."""
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
                log.warning("no ticks now: %s", error)
            except Exception as error:
                log.exception("the ticks of partitions %s failed", self._owned)
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
        """Partitions that wait for something outside."""
        excused = set(self._runner.waiting)
        if isinstance(self._processor, Stepwise):
            before, self._steps = self._steps, self._processor.steps
            if self._steps != before:
                # Of its calls, those of the others may all have had their turn first.
                excused.update(filter(self._processor.asking, self._owned))
        return excused

    async def _look_at_ends(self) -> None:
        """Now and then: where the owned partitions end, whatever was fetched."""
        while True:
            await asyncio.sleep(min(ENDS_S, self._settings.stall_limit / 4))
            places = [(topic, partition) for topic in self._processor.topics for partition in self._owned]
            try:
                self._ends.update(await self._log_ends.ask(places))
            except Exception as error:
                log.exception("where partitions %s end cannot be asked", self._owned)
                self.failed(error)
                return

    def _look_what_is_due(self) -> None:
        if not isinstance(self._processor, Timed):
            return
        lags = self._lag()
        for partition in self._owned:
            at_end = {topic for (topic, number), behind in lags.items() if number == partition and not behind}
            if self._lanes.idle(partition) and self._processor.due(partition, at_end):
                self._lanes.submit(partition, Job(()))

    def _not_ready(self) -> str | None:
        if not self._ready:
            return "its partitions are not assigned and recovered"
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
            event.ack()  # not done: it will be read again
            return

        def finished(done: bool) -> None:
            batch.done = done
            event.ack()

        self._lanes.submit(event.message.partition, Job(batch.records, finished))

    # -- partitions (faust_delivery.Owner)

    async def quiesce(self) -> None:
        # Nothing begins any more: it would not be waited for, and what is due would go by the state of a batch that
        # was given up half-way.
        self._ready = False
        await self._lanes.quiesce(self._settings.grace)

    def revoked(self) -> None:
        self._ready = False
        if self._over.is_set():
            return  # what still comes to its end goes on by its state, and nobody comes after it
        self._owned = ()
        self._ends.clear()
        for partition in sorted(self._restored):
            self._processor.revoke(partition)
            self._store.drop(partition)
        self._restored.clear()

    async def recover(self, partitions: Sequence[int]) -> None:
        started = time.monotonic()
        await self.quiesce()
        self.revoked()
        # What a batch that was given up had sent may still be on its way, to partitions that came back.
        await self._sink.settled()
        try:
            await self._restore(partitions)
        except (StateUnreadable, Diverged) as error:
            if isinstance(self._store, StateStore):
                raise  # it was read from the changelog
            # Once: what is on disk is only a copy.
            log.warning("%s; all of it is made anew from %s", error, self._changelog)
            self.revoked()
            await self._restore(partitions, anew=True)
        self._metrics.recovery_seconds = time.monotonic() - started
        self._progressed()

    async def _restore(self, partitions: Sequence[int], *, anew: bool = False) -> None:
        if self._changelog is not None:
            if not isinstance(self._store, StateStore):
                self._store.identity = await asyncio.to_thread(self._identity)
            folds: dict[int, Fold | DiskFold] = {}
            for partition in partitions:
                folds[partition] = self._store.open(partition, anew=anew)
                self._progressed()
            await read_changelog(self._changelog, folds, self._client(), self._progressed)
            self._metrics.recovered = sum(fold.read for fold in folds.values())
            for partition, fold in folds.items():
                self._runner.ends.begin(partition, fold.position)
                lost = fold.overwritten()
                if lost:
                    log.warning(
                        "%s[%d]: %d newer values lay behind older ones that were written late; written again",
                        self._changelog,
                        partition,
                        len(lost),
                    )
                    end = await self._sink.send([changelog_record(self._changelog, partition, entry) for entry in lost])
                    if not isinstance(self._store, StateStore):
                        # Or its database would not know it is complete up to there, nor from there on.
                        self._store.apply(partition, lost, end)
                    self._runner.ends.wrote(self._changelog, partition, len(lost), end)
                if isinstance(self._store, StateStore) and isinstance(fold, Fold):
                    self._store.load(partition, fold.state())
                self._progressed()
        for partition in partitions:
            self._restored.add(partition)
            try:
                self._runner.take_over(partition)
            except Exception as error:
                if anew or isinstance(self._store, StateStore):
                    raise
                raise StateUnreadable(f"the state on disk of partition {partition} is not right: {error}") from error
            self._progressed()

    def _make_store(self) -> "StateStore | DiskStore":
        settings, processor = self._settings, self._processor
        if settings.state == "memory" or self._changelog is None:
            return StateStore()
        from streams.disk import DiskStore
        from streams.malloc import give_back_large_blocks

        give_back_large_blocks()
        age = processor.age if isinstance(processor, Aged) else None
        return DiskStore(settings.state_dir / "rocksdb", age, settings.instance or "worker")

    def _identity(self) -> str:
        from streams.disk import identity_of

        return identity_of(client_config(self._settings.known), str(self._changelog))

    def delivering(self, partitions: Sequence[int]) -> None:
        self._owned = tuple(partitions)
        self._progress.begin()
        self._ready = not self._over.is_set()
        log.info(
            "%s owns partitions %s, recovered in %.2f s",
            self._processor.app_id,
            list(partitions),
            self._metrics.recovery_seconds,
        )

    def _progressed(self) -> None:
        self._counts.progressed_at = time.monotonic()

    def _client(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self._settings.bootstrap.split(","),
            "client_id": f"{self._processor.app_id}-recovery",
            **aiokafka(self._settings.security),
        }
