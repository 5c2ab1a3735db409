"""The worker's process: a member of the consumer group of its environment, several tasks at once.

Order of effects: results on the log and confirmed, then the offset of their task committed. So a worker that is killed
answers a task again; the join takes the first answer of a slot and supersedes the other.
"""

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import TopicPartition

from schemas import topics
from schemas.codec import DecodeError
from schemas.records import Result, Status, Task
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.health import Health, Turns, served
from tentalis.heartbeat import Heart
from tentalis.inference.protocol import Inference
from tentalis.kafka import GroupConsumer, Publisher, RecordTooLarge, Stored, make_codec, now_ms
from tentalis.metrics import Exporter
from tentalis.pressure import Pressure
from tentalis.reading import Reader
from tentalis.served import Served
from tentalis.service import run_service
from tentalis.workers.answer import Answerer, failed_instead, without_texts
from tentalis.workers.progress import Progress

log = logging.getLogger(__name__)

POLL_S = 0.1
# Beyond this a lane fetches no more; the group may wait an hour for its next poll (max.poll.interval.ms).
QUEUE_LIMIT = 1000
# Confirmations and commits may take a minute each while the broker is away.
STUCK_S = 300.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`concurrency`: tasks at once, to fill the server's batch. `server_id`: whose acknowledgements to believe."""

    environment: str
    server_url: str
    server_id: str
    worker_id: str
    concurrency: int = 8
    patience_s: float = 300.0
    api_key: str | None = None
    group_prefix: str = "tentalis-worker"


class Lane:
    """One consumer group on the tasks topic and what it has fetched: the shared one, or this worker's own.

    A task that names a target worker may lie on a partition that another member of the shared group owns. So targeted
    tasks are left to a group that the target has for itself, and the shared group passes over them.
    """

    def __init__(self, settings: Settings, group: str, *, targeted: bool) -> None:
        self.targeted = targeted
        self.progress = Progress()
        self.queue: deque[Stored] = deque()
        self.held: deque[tuple[Stored, Task]] = deque()
        self.member = False
        self._consumer = GroupConsumer(
            settings, group, [topics.TASKS], on_assign=self._assigned, on_revoke=self._revoked
        )

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        self.member = True
        self.progress.assign((p.topic, p.partition) for p in partitions)
        log.info("partitions assigned: %s", sorted(p.partition for p in partitions))

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        self.progress.revoke((p.topic, p.partition) for p in partitions)
        for item in [item for item in self.held if not self.progress.owns(item[0])]:
            self.held.remove(item)
            self.progress.forget(item[0])
        kept: deque[Stored] = deque()
        for stored in self.queue:
            if self.progress.owns(stored):
                kept.append(stored)
            else:
                self.progress.forget(stored)
        self.queue = kept

    def poll(self, timeout: float) -> None:
        """Fetches; callbacks of the group run inside. Nothing else may touch this lane meanwhile."""
        if len(self.queue) + len(self.held) >= QUEUE_LIMIT:
            return
        self.queue.extend(stored for stored in self._consumer.poll(timeout, 100) if self.progress.begin(stored))

    def commit(self) -> None:
        """Commits what is done. A commit that a rebalance overtook is dropped: those tasks come again."""
        self._consumer.commit(self.progress.committable())

    def close(self) -> None:
        """Leaves the group."""
        self._consumer.close()


def is_mine(task: Task, options: WorkerOptions, *, targeted: bool) -> bool:
    """Whether a worker is to answer a task that it finds in its lane of targeted tasks, or in the shared one."""
    if task.environment != options.environment or task.answered:
        return False
    return task.target_worker == options.worker_id if targeted else task.target_worker is None


class WorkerMetrics:
    """What a worker exports. The callables count tasks."""

    def __init__(self, running: Callable[[], int], queued: Callable[[], int], held: Callable[[], int]) -> None:
        self.exporter = exporter = Exporter("worker")
        self._tasks = exporter.counter(metrics.WORKER_TASKS)
        self._samples = exporter.counter(metrics.WORKER_SAMPLES)
        self._tokens = exporter.counter(metrics.WORKER_TOKENS)
        self._seconds = exporter.histogram(metrics.WORKER_SECONDS)
        exporter.read(metrics.WORKER_RUNNING, running)
        exporter.read(metrics.WORKER_QUEUED, queued)
        exporter.read(metrics.WORKER_HELD, held)

    def answered(self, results: Sequence[Result]) -> None:
        """The results of one task are on the log."""
        for result in results:
            self._samples.labels(result.status.value).inc()
            self._tokens.inc(len(result.response_token_ids) // 4)
        self._tasks.labels("ok" if all(result.status is Status.OK for result in results) else "failed").inc()
        self._seconds.observe(max((result.elapsed_s for result in results), default=0.0))


class Worker:
    """Takes tasks from its lanes, answers up to `concurrency` at once, publishes, commits."""

    def __init__(self, options: WorkerOptions, settings: Settings, inference: Inference) -> None:
        self._options = options
        codec = make_codec(settings)
        self._codec = codec
        self._served = Served(options.server_id)
        self._acks = Reader(settings, [topics.POLICY_ACKS, topics.POLICIES], codec)
        self._pressure = Pressure()
        self._publisher = Publisher(settings, f"tentalis/worker/{options.worker_id}", codec)
        shared = f"{options.group_prefix}-{options.environment}"
        self._lanes = (
            Lane(settings, shared, targeted=False),
            Lane(settings, f"{shared}-{options.worker_id}", targeted=True),
        )
        self._answerer = Answerer(
            inference,
            self._served,
            worker_id=options.worker_id,
            server_id=options.server_id,
            patience_s=options.patience_s,
        )
        self._running: dict[asyncio.Task[tuple[list[Result], str | None]], tuple[Lane, Stored]] = {}
        self._served_changed = False
        self.turns = Turns(STUCK_S)
        self.metrics = WorkerMetrics(
            lambda: len(self._running),
            lambda: sum(len(lane.queue) for lane in self._lanes),
            lambda: sum(len(lane.held) for lane in self._lanes),
        )

    async def run(self, stop: threading.Event) -> None:
        """Until `stop`; then what is under way is given up, uncommitted."""
        heart = Heart()
        try:
            while not stop.is_set():
                heart.beat()
                self.turns.turned()
                await asyncio.to_thread(self._poll)
                await self._publish_finished()
                self._start_queued()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for closeable in (*self._lanes, self._acks):
                closeable.close()

    def not_ready(self) -> str | None:
        """Why no task would be answered now. That no version is served yet is no reason: tasks wait for it."""
        if not all(lane.member for lane in self._lanes):
            return "it is not a member of its consumer groups yet"
        return None if self._acks.caught_up else "the acknowledgements are not read to their end yet"

    def _poll(self) -> None:
        for lane in self._lanes:
            lane.poll(POLL_S / len(self._lanes))
        for _, record in self._acks.poll(0.0):
            self._served_changed |= self._served.apply(record)
            self._pressure.apply(record)

    def _start_queued(self) -> None:
        if self._served_changed:
            self._served_changed = False
            self._answerer.served_changed()
        for lane in self._lanes:
            while lane.held and self._free and not self._unwanted(lane.held[0][1]):
                stored, task = lane.held.popleft()
                self._start(lane, stored, task)
            while lane.queue and self._free:
                stored = lane.queue.popleft()
                found = self._mine(stored, lane)
                if found is None:
                    lane.progress.finish(stored)
                elif self._unwanted(found):
                    lane.held.append((stored, found))
                else:
                    self._start(lane, stored, found)

    @property
    def _free(self) -> bool:
        return len(self._running) < self._options.concurrency

    def _unwanted(self, task: Task) -> bool:
        """Whether the trainer would throw the answer away and nobody else waits for it: a task of a run is made for
        training, one without is somebody's question."""
        return task.run_id is not None and self._pressure.closed(task.policy, now_ms()) is not None

    def _start(self, lane: Lane, stored: Stored, task: Task) -> None:
        log.info("task %s (%d samples)", task.task_id, task.n_samples)
        answering = asyncio.create_task(self._answer(task, stored))
        self._running[answering] = (lane, stored)

    async def _answer(self, task: Task, stored: Stored) -> tuple[list[Result], str | None]:
        """The results, and the trace that they go on with."""
        parent = tracing.continued(stored.headers, task.task_id)
        with tracing.span("generate", parent=parent, task_id=task.task_id) as span:
            return await self._answerer.answer(task, stored.timestamp), span.traceparent

    def _mine(self, stored: Stored, lane: Lane) -> Task | None:
        try:
            record = stored.decode_own(self._codec)
        except DecodeError as error:
            log.warning("skipped: %s", error)  # scoring owns the dead letters of tasks
            return None
        assert isinstance(record, Task)
        return record if is_mine(record, self._options, targeted=lane.targeted) else None

    async def _publish_finished(self) -> None:
        finished = [task for task in self._running if task.done()]
        for task in finished:
            results, traceparent = task.result()
            for result in results:
                self._send(result, traceparent)
        if finished:
            await asyncio.to_thread(self._publisher.flush)
        for task in finished:
            self.metrics.answered(task.result()[0])
            lane, stored = self._running.pop(task)
            lane.progress.finish(stored)
        for lane in self._lanes:
            await asyncio.to_thread(lane.commit)

    def _send(self, result: Result, traceparent: str | None) -> None:
        try:
            self._publisher.send(topics.RESULTS, result, traceparent=traceparent)
        except RecordTooLarge as error:
            log.error("%s", error)
            failed = failed_instead(result, result.error or str(error))
            try:
                self._publisher.send(topics.RESULTS, failed, traceparent=traceparent)
            except RecordTooLarge:
                self._publisher.send(topics.RESULTS, without_texts(failed), traceparent=traceparent)


def run(
    settings: Settings,
    *,
    environment: str,
    server: str,
    worker_id: str | None = None,
    server_id: str = "local",
    concurrency: int = 8,
    metrics_port: int | None = None,
) -> None:
    """The process: answers tasks of `environment` through the inference server at the URL `server`, until SIGTERM.

    `worker_id` (default: host name and environment) must be the worker's own and stay the same over restarts.
    Raises PortTaken.
    """
    from tentalis.inference.client import OpenAIClient

    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request says nothing here
    name = worker_id or f"{socket.gethostname()}-{environment}"
    options = WorkerOptions(environment, server, server_id, name, concurrency)

    async def main(stop: threading.Event) -> None:
        async with OpenAIClient(options.server_url, options.api_key) as inference:
            worker = Worker(options, settings, inference)
            with served(Health(worker.metrics.exporter, worker.not_ready, worker.turns.stuck), metrics_port):
                await worker.run(stop)

    run_service("worker", lambda stop: asyncio.run(main(stop)))
