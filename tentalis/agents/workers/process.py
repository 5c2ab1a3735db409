"""The worker's process: a member of its environment's consumer group that answers several tasks concurrently.

The results of a task are on the log and confirmed before the task's offset is committed. So the task of a worker that
was killed is answered again; the join takes the first answer of a slot and supersedes the other.
"""

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import TopicPartition

from schemas import topics
from schemas.records import LogprobsMode, Result, Status, Task
from schemas.wire.codec import DecodeError
from tentalis.agents.environments import Environment, RunsProgram
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.environments.stoppable import StuckThread
from tentalis.agents.workers import metrics
from tentalis.agents.workers.answer import Answerer, send_fitting
from tentalis.agents.workers.episode_gateway import EpisodeGateway
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.agents.workers.held_tasks import HeldTasks
from tentalis.agents.workers.places import Places
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.agents.workers.program_episodes import ProgramEpisodes
from tentalis.agents.workers.progress import OffsetProgress
from tentalis.agents.workers.session_log import SessionLog
from tentalis.inference.episode_secret import shared_secret
from tentalis.inference.protocol import Inference
from tentalis.inference.replicas.metrics import export_replicas
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import GroupConsumer, Lags, Stored
from tentalis.kafka.identity import PartitionLoss, described
from tentalis.kafka.loss_audit import loss_audit
from tentalis.kafka.metrics import CONSUMER_LAG
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import Reader
from tentalis.kafka.skipped import SKIPPED
from tentalis.kafka.topic_watch import ending_on_changes
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.backpressure import Backpressure
from tentalis.policies.candidates import Candidates
from tentalis.policies.served import ServedVersions
from tentalis.service import tracing
from tentalis.service.health import Health, LoopWatch, served
from tentalis.service.heartbeat import Heart
from tentalis.service.lifecycle import run_service
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings
from tentalis.storage.attachments import AttachmentStore
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

# Seconds that a turn waits for tasks, while there are any and while there are none. A task of the shared group ends the
# wait; what targets this worker, and an acknowledgement, are found at its end.
POLL_S, IDLE_POLL_S = 0.1, 0.5
# A consumer with this many tasks does not fetch; the group may wait an hour for its next poll (max.poll.interval.ms).
# A worker with this many tasks that lend their place starts no others.
QUEUE_LIMIT = 1000
# Confirmations and commits may take a minute each while the broker is unavailable.
STUCK_S = 300.0
LEAVE_S = 300.0
"""Seconds in which the tasks under way may end when this process must be replaced. The others are begun again."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker. `server_url`: of the model server, or of each of its replicas, separated by commas.
    `concurrency`: number of concurrent tasks, to fill the server's batch. `server_id`: the server whose
    acknowledgements count. `logprobs_mode`: the distribution of the server's log-probs; None: as the
    server declares it. `model`: the name of a plain model that answers instead of a policy's versions. `limits`: those
    of episodes. `hedge_after_s`: see ReplicatedClient. `gateway`: URL of the gateway that programs call."""

    environment: str
    server_url: str
    server_id: str
    worker_id: str
    concurrency: int = 8
    patience_s: float = 300.0
    api_key: str | None = None
    logprobs_mode: LogprobsMode | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    limits: EpisodeLimits = field(default=EpisodeLimits(), kw_only=True)
    hedge_after_s: float | None = field(default=None, kw_only=True)
    gateway: str | None = field(default=None, kw_only=True)


class TaskConsumer:
    """A consumer group on the tasks topic with its queue of fetched tasks: the shared group, or this worker's own.

    A task that names a target worker may lie on a partition that another member of the shared group owns. So each
    worker has its own group for the tasks that target it, and the shared group skips targeted tasks.
    """

    def __init__(
        self, settings: Settings, group: str, on_loss: Callable[[list[PartitionLoss]], None], *, targeted: bool
    ) -> None:
        self.targeted = targeted
        self.progress = OffsetProgress()
        self.queue: deque[Stored] = deque()
        self.held = HeldTasks()
        self.member = False
        self._consumer = GroupConsumer(
            settings, group, [topics.TASKS], on_assign=self._assigned, on_revoke=self._revoked, on_loss=on_loss
        )

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        self.member = True
        self.progress.assign((p.topic, p.partition) for p in partitions)
        log.info("partitions assigned: %s", sorted(p.partition for p in partitions))

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        self.progress.revoke((p.topic, p.partition) for p in partitions)
        for stored in self.held.remove(lambda stored: not self.progress.owns(stored)):
            self.progress.forget(stored)
        kept: deque[Stored] = deque()
        for stored in self.queue:
            if self.progress.owns(stored):
                kept.append(stored)
            else:
                self.progress.forget(stored)
        self.queue = kept

    @property
    def full(self) -> bool:
        """True if it has so many tasks that it fetches no more."""
        return len(self.queue) + len(self.held) >= QUEUE_LIMIT

    @property
    def empty(self) -> bool:
        """True if it has no task that was not begun."""
        return not self.queue and not len(self.held)

    def poll(self, timeout: float) -> None:
        """Fetches tasks. The group's callbacks run inside this call; nothing else may use the consumer meanwhile."""
        if self.full:
            return
        self.queue.extend(stored for stored in self._consumer.poll(timeout, 100) if self.progress.begin(stored))

    def lag(self) -> Lags:
        """The records of the owned partitions that were not fetched yet."""
        return self._consumer.lag()

    def commit(self) -> None:
        """Commits the finished tasks. A commit that a rebalance overtook is dropped: its tasks are delivered again."""
        self._consumer.commit(self.progress.committable())

    def close(self) -> None:
        """Leaves the group."""
        self._consumer.close()


def is_mine(task: Task, options: WorkerOptions, *, targeted: bool) -> bool:
    """Returns True if a worker must answer a task from the consumer of targeted tasks, or from the shared consumer."""
    if task.environment != options.environment or task.answered:
        return False
    return task.target_worker == options.worker_id if targeted else task.target_worker is None


class WorkerMetrics:
    """The metrics of a worker. The callables count tasks; `lag` has the records behind; `routers`: of the replicas that
    it asks."""

    def __init__(
        self,
        running: Callable[[], int],
        queued: Callable[[], int],
        held: Callable[[], int],
        lag: Callable[[], Lags] = dict,
        routers: Sequence[ReplicaRouter] = (),
    ) -> None:
        self.exporter = exporter = Exporter("worker")
        export_replicas(exporter, routers)
        self._tasks = exporter.counter(metrics.WORKER_TASKS)
        self._samples = exporter.counter(metrics.WORKER_SAMPLES)
        self._tokens = exporter.counter(metrics.WORKER_TOKENS)
        self._seconds = exporter.histogram(metrics.WORKER_SECONDS)
        exporter.read(metrics.WORKER_RUNNING, running)
        exporter.read(metrics.WORKER_QUEUED, queued)
        exporter.read(metrics.WORKER_HELD, held)
        exporter.read(CONSUMER_LAG, lag)

    def answered(self, results: Sequence[Result]) -> None:
        """Counts the results of one task, which are on the log."""
        for result in results:
            self._samples.labels(result.status.value).inc()
            self._tokens.inc(len(result.response_token_ids) // 4)
        statuses = {result.status for result in results}
        ending = next((status for status in (Status.INFRA, Status.FAILED) if status in statuses), Status.OK)
        self._tasks.labels(ending.value).inc()
        self._seconds.observe(max((result.elapsed_s for result in results), default=0.0))


class Worker:
    """Takes tasks from its consumers, answers up to `concurrency` concurrently, publishes the results and commits."""

    def __init__(
        self,
        options: WorkerOptions,
        settings: Settings,
        inference: Inference,
        make_environment: Callable[[], Environment] | None = None,
        routers: Sequence[ReplicaRouter] = (),
        attachments: AttachmentStore | None = None,
    ) -> None:
        """`make_environment`: makes the environment of an episode; None: one completion answers a sample. `routers`: of
        the replicas that `inference` asks. `attachments`: the store of the files of episodes."""
        self._options = options
        codec = make_codec(settings)
        self._codec = codec
        self._served = ServedVersions(options.server_id)
        self._assigned = AssignedVersions()
        self._candidates = Candidates(options.server_id)
        self._acks = Reader(settings, [topics.POLICY_ACKS, topics.POLICIES], codec)
        self._pressure = Backpressure()
        self._publisher = Publisher(settings, f"tentalis/worker/{options.worker_id}", codec)
        shared = topology.named("worker").consumer_group(environment=options.environment)
        self._consumers = (
            self._task_consumer(settings, shared, targeted=False),
            self._task_consumer(settings, f"{shared}-{options.worker_id}", targeted=True),
        )
        self._answerer: Answerer | EpisodePlayer
        self._player: EpisodePlayer | None = None
        self._places = Places(options.concurrency)
        self._policies = PolicyCalls(
            self._served,
            self._assigned,
            self._candidates,
            worker_id=options.worker_id,
            server_id=options.server_id,
            patience_s=options.patience_s,
            model=options.model,
            places=self._places,
        )
        names = {"worker_id": options.worker_id, "server_id": options.server_id}
        if make_environment is None:
            self._answerer = Answerer(inference, self._policies, **names)
        else:
            self._player = EpisodePlayer(
                inference,
                self._policies,
                make_environment,
                options.limits,
                **names,
                attachments=attachments,
                programs=self._programs(settings, make_environment),
            )
            self._answerer = self._player
        self._running: dict[asyncio.Task[tuple[list[Result], str | None]], tuple[TaskConsumer, Stored]] = {}
        self._served_changed = False
        self._lag: Lags = {}
        self.turns = LoopWatch(STUCK_S)
        self.metrics = WorkerMetrics(
            lambda: len(self._running),
            lambda: sum(len(consumer.queue) for consumer in self._consumers),
            lambda: sum(len(consumer.held) for consumer in self._consumers),
            lambda: self._lag,
            routers,
        )

    def _programs(self, settings: Settings, make_environment: Callable[[], Environment]) -> ProgramEpisodes | None:
        """Returns what plays the programs of the environment, None if it has none. Raises BadEpisodeSecret, OSError."""
        if self._options.gateway is None or not isinstance(make_environment(), RunsProgram):
            return None
        sessions = SessionLog(settings, make_codec(settings))
        secret = shared_secret(settings, create=True)
        gateway = EpisodeGateway(self._options.gateway)
        return ProgramEpisodes(gateway, sessions, self._policies, secret, self._options.worker_id)

    def _task_consumer(self, settings: Settings, group: str, *, targeted: bool) -> TaskConsumer:
        def record(losses: list[PartitionLoss]) -> None:
            """Records tasks that cannot be answered any more. The join gives each an outcome when its time is over."""
            log.warning("%s; reading from the beginning of the log", described(losses))
            for loss in losses:
                self._publisher.send(topics.AUDIT, loss_audit(loss, topology.named("worker").app_id, group))
            self._publisher.flush()

        return TaskConsumer(settings, group, record, targeted=targeted)

    async def run(self, stop: threading.Event) -> None:
        """Runs until `stop`; then drops the tasks under way without a commit.

        Raises StuckThread if a thread of an episode could not be stopped: when the results of all tasks under way are
        on the log, or after LEAVE_S seconds.
        """
        heart, leaves_at = Heart(), 0.0
        try:
            while not stop.is_set():
                heart.beat()
                self.turns.turned()
                await asyncio.to_thread(self._poll)
                await self._publish_finished()
                if self._served_changed:
                    self._served_changed = False
                    self._policies.changed()
                if self._stuck is None:
                    self._start_queued()
                    leaves_at = time.monotonic() + LEAVE_S
                elif not self._running or time.monotonic() > leaves_at:
                    raise StuckThread(self._stuck)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for closeable in (*self._consumers, self._acks):
                closeable.close()

    @property
    def _stuck(self) -> str | None:
        """The reason why this process must be replaced, or None."""
        return None if self._player is None else self._player.stuck

    def not_ready(self) -> str | None:
        """Returns the reason why the worker cannot answer tasks yet, or None.

        A worker without a served version is ready: its tasks wait for one.
        """
        if not all(consumer.member for consumer in self._consumers):
            return "the worker has not joined its consumer groups yet"
        return None if self._acks.caught_up else "the acknowledgements have not been read to their end yet"

    def _poll(self) -> None:
        idle = not self._running and all(consumer.empty for consumer in self._consumers)
        shared, targeted = self._consumers
        if shared.full and targeted.full:
            time.sleep(POLL_S)
        shared.poll(IDLE_POLL_S if idle else POLL_S)
        targeted.poll(POLL_S if shared.full else 0.0)
        for _, record in self._acks.poll(0.0):
            self._served_changed |= self._served.apply(record)
            self._served_changed |= self._assigned.apply(record)
            self._served_changed |= self._candidates.apply(record)
            self._pressure.apply(record)
        self._lag = self._acks.lag() | shared.lag()

    def _start_queued(self) -> None:
        for consumer in self._consumers:
            while self._free and (taken := consumer.held.take(self._wanted)) is not None:
                self._start(consumer, *taken)
            while consumer.queue and self._free:
                stored = consumer.queue.popleft()
                found = self._mine(stored, consumer)
                if found is None:
                    consumer.progress.finish(stored)
                elif self._wanted(found):
                    self._start(consumer, stored, found)
                else:
                    consumer.held.add(stored, found)

    @property
    def _free(self) -> bool:
        return self._places.free and self._places.lent < QUEUE_LIMIT

    def _wanted(self, task: Task) -> bool:
        """Returns False if the trainer would discard the answer and no one else needs it.

        A task of a run exists only for training; a task without a run is a question of a user.
        """
        if task.run_id is None:
            return True
        return self._pressure.closed(task.policy, now_ms(), for_candidate=self._candidates.covers(task)) is None

    def _start(self, consumer: TaskConsumer, stored: Stored, task: Task) -> None:
        log.info("task %s (%d samples)", task.task_id, task.n_samples)
        self._places.take()
        answering = asyncio.create_task(self._answer(task, stored))
        self._running[answering] = (consumer, stored)

    async def _answer(self, task: Task, stored: Stored) -> tuple[list[Result], str | None]:
        """Returns the results, and the trace that they continue."""
        parent = tracing.continued(stored.headers, task.task_id)
        with tracing.span("generate", parent=parent, task_id=task.task_id) as span:
            return await self._answerer.answer(task, stored.timestamp), span.traceparent

    def _mine(self, stored: Stored, consumer: TaskConsumer) -> Task | None:
        try:
            record = stored.decode_own(self._codec)
        except DecodeError as error:
            SKIPPED.add(error)  # scoring dead-letters undecodable tasks
            return None
        assert isinstance(record, Task)
        return record if is_mine(record, self._options, targeted=consumer.targeted) else None

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
            consumer, stored = self._running.pop(task)
            self._places.leave()
            consumer.progress.finish(stored)
        for consumer in self._consumers:
            await asyncio.to_thread(consumer.commit)

    def _send(self, result: Result, traceparent: str | None) -> None:
        send_fitting(lambda each: self._publisher.send(topics.RESULTS, each, traceparent=traceparent), result)


def run(
    settings: Settings,
    *,
    environment: str,
    server: str,
    worker_id: str | None = None,
    server_id: str = "local",
    concurrency: int = 8,
    logprobs_mode: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    limits: EpisodeLimits | None = None,
    tools: Path | None = None,
    tasks: Path | None = None,
    allow_unsandboxed: bool = False,
    metrics_port: int | None = None,
    hedge_after_s: float | None = None,
    gateway: str | None = None,
) -> None:
    """Answers tasks of `environment` through the inference server at the URL `server`, or its replicas at several URLs,
    separated by commas, until SIGTERM.

    `worker_id` (default: host name and environment) must be unique and stay the same over restarts. `logprobs_mode`:
    raw or processed, the distribution of the server's log-probs; None: as the server declares it. `api_key`: for the
    server. `model`: a plain model of the server, which answers instead of a policy's versions. For an environment with
    episodes: `limits`, the file `tools`, the folder `tasks`, and `allow_unsandboxed`, which lets actions run without a
    wall. `hedge_after_s`: see ReplicatedClient. `gateway`: the URL of the gateway that programs of an environment call.

    Raises PortTaken, BadEnvironment, BadEpisodeSecret, BadProgram, BadTasks, BadTools, MissingExtra or WallMissing; and
    BadLocation or StorageError, if the store of attachments that the settings name cannot be written.
    """
    from tentalis.inference.client import OpenAIClient
    from tentalis.inference.replicas.client import inference_client, routers_of

    attachments = AttachmentStore.of(settings)
    make_environment = prepared_environment(
        environment,
        tools=tools,
        tasks=tasks,
        allow_unsandboxed=allow_unsandboxed,
        attachment_bytes=None if attachments is None else attachments.limit,
    )
    if attachments is not None and make_environment is not None:
        attachments.check()

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line per request
    name = worker_id or f"{socket.gethostname()}-{environment}"
    mode = None if logprobs_mode is None else LogprobsMode(logprobs_mode)
    options = WorkerOptions(
        environment,
        server,
        server_id,
        name,
        concurrency,
        api_key=api_key,
        logprobs_mode=mode,
        model=model,
        limits=limits or EpisodeLimits(),
        hedge_after_s=hedge_after_s,
        gateway=gateway,
    )

    def client(url: str) -> OpenAIClient:
        return OpenAIClient(url, options.api_key, logprobs_mode=mode, check_logprobs=True)

    async def main(stop: threading.Event) -> None:
        async with inference_client(options.server_url, client, options.hedge_after_s) as inference:
            worker = Worker(options, settings, inference, make_environment, routers_of(inference), attachments)
            with served(Health(worker.metrics.exporter, worker.not_ready, worker.turns.stuck), metrics_port):
                await worker.run(stop)

    watched = topology.named("worker").used_topics
    run_service("worker", ending_on_changes(settings, watched, lambda stop: asyncio.run(main(stop))))
