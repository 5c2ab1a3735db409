"""`tentalis serve policies`: the guard that promotes, the sync of one server, both with all state from the log, and the
owner of the dead letters of the control topics.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from schemas import topics
from schemas.records import EvalResult, PolicyUpdate, Promotion
from tentalis.dlq.owner import ControlDeadLetters
from tentalis.inference.protocol import Inference, InferenceError, ServerUnavailable
from tentalis.inference.replicas.metrics import export_replicas
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Lags
from tentalis.kafka.metrics import CONSUMER_LAG
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import Reader
from tentalis.kafka.topic_watch import ending_on_changes
from tentalis.policies import metrics
from tentalis.policies.core import PolicyLog
from tentalis.policies.guard import GuardMode
from tentalis.policies.guardian import Guardian
from tentalis.policies.live import LiveRollouts
from tentalis.policies.replica import AdapterRejected, AdapterServer
from tentalis.policies.sync import AdapterSync, ServerAck
from tentalis.rewards.chat import NoApiKey
from tentalis.rewards.verdict import ScorerAway
from tentalis.rewards.votes import NoVote
from tentalis.service import tracing
from tentalis.service.health import Health, LoopWatch, served
from tentalis.service.heartbeat import Heart
from tentalis.service.lifecycle import run_service
from tentalis.service.metrics import Exporter
from tentalis.service.security import BadSecurity
from tentalis.service.settings import Settings
from tentalis.storage.places import adapter_cache

log = logging.getLogger(__name__)

# Seconds that a turn waits for records of the control topics, while a candidate is tried and otherwise.
POLL_S, IDLE_POLL_S = 0.1, 0.5
# Interval of the checks for a server that lost its adapters in a restart.
CHECK_SERVER_S = 2.0
# `always` ignores the run's configuration, `run` follows it; with any other value this process promotes nothing.
ALWAYS, FOLLOW_RUN = "always", "run"
# Interval of the guard's checks of served versions, and pause before a candidate that could not be tried is retried.
WATCH_S, TRY_AGAIN_S = 2.0, 5.0
# Loading a large adapter and its canary are one turn of the loop.
STUCK_S = 900.0


class PolicyMetrics:
    """The metrics of the process.

    `server_up`: True if the inference server answered the last request. `lag`: the records behind. `replicas_up`: 1 for
    each replica of the server, by its URL, that answered its last call. `routers`: choose between several replicas.
    """

    def __init__(
        self,
        server_up: Callable[[], bool],
        lag: Callable[[], Lags] = dict,
        replicas_up: Callable[[], Mapping[tuple[str, ...], float]] = dict,
        routers: Sequence[ReplicaRouter] = (),
    ) -> None:
        self.exporter = exporter = Exporter("policies")
        self._acks = exporter.counter(metrics.POLICIES_ACKS)
        self._seconds = exporter.histogram(metrics.POLICIES_SWAP)
        self._canary = exporter.gauge(metrics.POLICIES_CANARY)
        self._served = exporter.gauge(metrics.POLICIES_SERVED)
        self._promoted = exporter.gauge(metrics.POLICIES_PROMOTED)
        self._verdicts = exporter.counter(metrics.POLICIES_VERDICTS)
        exporter.read(metrics.POLICIES_SERVER_UP, lambda: float(server_up()))
        exporter.read(metrics.POLICIES_REPLICA_UP, replicas_up)
        export_replicas(exporter, routers)
        exporter.read(CONSUMER_LAG, lag)

    def acknowledged(self, ack: ServerAck) -> None:
        """Counts an acknowledgement that is on the log."""
        self._acks.labels("ok" if ack.ok else "refused").inc()
        if ack.ok:
            self._seconds.observe(ack.load_seconds)
        if ack.canary_max_diff is not None:
            self._canary.set(ack.canary_max_diff)

    def judged(self, verdict: EvalResult) -> None:
        """Counts a verdict of the guard."""
        self._verdicts.labels("passed" if verdict.passed else "refused").inc()

    def synced(self, log_state: PolicyLog) -> None:
        """Updates the versions after a round of the sync."""
        for policy in log_state.policies:
            self._promoted.labels(policy).set(log_state.promotion(policy).version)
            version = log_state.served_version(policy)
            if version is not None:
                self._served.labels(policy).set(version)


class PolicyService:
    """The policies process, without signal handling.

    `servers`: the replicas of the server by URL, which load the adapters. `inference`: asks them, and `routers` choose
    between several. `promotion`: `run` applies the setting of each run, `always` promotes every version, `manual` and
    `none` promote nothing. `dtype`: the server's precision, None as it declares.
    """

    def __init__(
        self,
        settings: Settings,
        servers: Mapping[str, AdapterServer],
        inference: Inference,
        *,
        server_id: str,
        promotion: str,
        dtype: str | None = None,
        routers: Sequence[ReplicaRouter] = (),
    ) -> None:
        self._settings, self._codec = settings, make_codec(settings)
        codec = self._codec
        self._promotion = promotion
        self._by = f"guard/{server_id}"
        self._log = PolicyLog(server_id)
        # Runs and verdicts first: they must be known before the version that they concern.
        deciding = [topics.EVALS] if promotion == FOLLOW_RUN else []
        self._reader = Reader(settings, [topics.RUNS, *deciding, topics.POLICIES, topics.POLICY_ACKS], codec)
        self._publisher = Publisher(settings, f"tentalis/policies/{server_id}", codec)
        self._owner = ControlDeadLetters(settings, codec, self._publisher)
        self._traces: dict[str, str | None] = {}
        files = adapter_cache(settings)
        self._sync = AdapterSync(servers, self._log, server_id, self._acknowledge, files, self._traces, dtype)
        self._guardian = Guardian(settings, codec, inference, self._log, self._by)
        self._promoting: dict[str, int] = {}
        self._trial: asyncio.Task[EvalResult | None] | None = None
        self._next_trial_at, self._next_watch_at = 0.0, 0.0
        self._live: LiveRollouts | None = None
        self._next_check_at = 0.0
        self._unreachable = ""
        self._lag: Lags = {}
        self._heartbeat = Heart()
        self._server_asked = False
        self.loop_watch = LoopWatch(STUCK_S)
        self.metrics = PolicyMetrics(
            lambda: self._server_asked and not self._unreachable, lambda: self._lag, self._replicas_up, routers
        )

    def _replicas_up(self) -> dict[tuple[str, ...], float]:
        return {(each.url,): float(self._server_asked and not each.away) for each in self._sync.replicas}

    def not_ready(self) -> str | None:
        """The reason why a promotion would not be served now, None if it would."""
        if not self._reader.caught_up:
            return "promotions and acknowledgements have not been read to their end yet"
        if not self._server_asked:
            return "the inference server has not been asked yet"
        return self._unreachable or self._sync.problem or None

    async def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set."""
        try:
            while not stop.is_set():
                await self.step()
        finally:
            if self._trial is not None:
                self._trial.cancel()
            if self._live is not None:
                self._live.close()
            await self._guardian.close()
            self._reader.close()
            self._owner.close()

    async def step(self) -> None:
        """Reads new records, promotes and syncs where due, and dead-letters what cannot be decoded.

        Raises TooManyDead and the other errors of `ControlDeadLetters.step`.
        """
        self.loop_watch.turned()
        await asyncio.to_thread(self._owner.step)
        found = await asyncio.to_thread(self._reader.poll, IDLE_POLL_S if self._trial is None else POLL_S)
        self._lag = self._reader.lag()
        for stored, record in found:
            self._log.apply(record, stored.offset)
            if isinstance(record, PolicyUpdate):
                self._traces[record.name] = tracing.traceparent_of(stored.headers)
        if not self._reader.caught_up:
            return
        if self._promotion in (ALWAYS, FOLLOW_RUN):
            await asyncio.to_thread(self._promote)
        if self._promotion == FOLLOW_RUN:
            await self._guard()
        if found or time.monotonic() >= self._next_check_at:
            self._next_check_at = time.monotonic() + CHECK_SERVER_S
            await self._sync_round()
        self._heartbeat.beat(self._unreachable or self._sync.problem)

    def _promote(self) -> None:
        always = self._promotion == ALWAYS
        due = [u for u in self._log.due_promotions(always=always) if self._promoting.get(u.policy, -1) < u.version]
        for update in due:
            log.info("promoting %s", update.name)
            mode = GuardMode.ALWAYS if always else self._log.rule(update).mode
            self._decide(self._guardian.promotion(update, mode), self._traces.get(update.name))
            self._promoting[update.policy] = update.version

    def _decide(self, record: Promotion | EvalResult, traceparent: str | None = None) -> None:
        """Writes a decision and applies it; a promotion is applied only when it is read back, with its offset."""
        topic = topics.POLICIES if isinstance(record, Promotion) else topics.EVALS
        self._publisher.send(topic, record, traceparent=traceparent)
        self._publisher.flush()
        if isinstance(record, EvalResult):
            self._log.apply(record, -1)
            self.metrics.judged(record)

    async def _guard(self) -> None:
        """Tries one candidate at a time in the background, and checks the served versions."""
        if self._trial is not None and self._trial.done():
            trial, self._trial = self._trial, None
            self._on_trial_end(trial)
        for update in self._log.refused():
            if self._promoting.get(update.policy, -1) < update.version:
                self._promoting[update.policy] = update.version
                await asyncio.to_thread(self._decide, self._guardian.refusal_rollback(update))
        candidates = self._log.untried()
        if candidates and self._trial is None and time.monotonic() >= self._next_trial_at:
            self._trial = asyncio.create_task(self._try_candidate(candidates[0]))
        if time.monotonic() >= self._next_watch_at and (guarded := self._log.guarded()):
            self._next_watch_at = time.monotonic() + WATCH_S
            await asyncio.to_thread(self._watch, guarded)

    async def _try_candidate(self, update: PolicyUpdate) -> EvalResult | None:
        log.info("trying %s", update.name)
        await self._sync.load(update)
        return await self._guardian.try_candidate(update)

    def _on_trial_end(self, trial: "asyncio.Task[EvalResult | None]") -> None:
        self._next_trial_at = time.monotonic() + TRY_AGAIN_S
        try:
            verdict = trial.result()
        except (InferenceError, AdapterRejected, ScorerAway, NoVote, NoApiKey, BadSecurity) as error:
            log.warning("the candidate cannot be tried, retrying in %g s: %s", TRY_AGAIN_S, error)
            return
        if verdict is None:
            log.info("no prompts to try a candidate on: no task of the policy is on the log yet")
            return
        self._next_trial_at = 0.0
        (log.info if verdict.passed else log.error)("%s: %s", verdict.policy, verdict.details or "passed the guard")
        self._decide(verdict)

    def _watch(self, guarded: list[PolicyUpdate]) -> None:
        if self._live is None:
            self._live = LiveRollouts(self._settings, self._codec)
        self._live.poll()
        for update in guarded:
            found = self._guardian.check_served(update, self._live.answers)
            if found is None:
                continue
            verdict, rollback = found
            # The rollback is written first: a fall is judged once, so a crash after the verdict would leave it out.
            if rollback is not None:
                self._decide(rollback)
            self._decide(verdict)

    async def _sync_round(self) -> None:
        try:
            await self._sync.round()
        except ServerUnavailable as error:
            if not self._unreachable:
                log.warning("the inference server is unreachable: %s", error)
            self._unreachable = f"the inference server is unreachable: {error}"
        else:
            if self._unreachable:
                log.info("the inference server is reachable again")
            self._unreachable = ""
        self._server_asked = True
        self.metrics.synced(self._log)

    def _acknowledge(self, ack: ServerAck) -> None:
        self._publisher.send(topics.POLICY_ACKS, ack, traceparent=self._traces.get(ack.name))
        self._publisher.flush()
        self._log.apply(ack, -1)
        self.metrics.acknowledged(ack)


def serve(
    settings: Settings,
    *,
    server: str,
    server_id: str = "local",
    promotion: str = FOLLOW_RUN,
    dtype: str | None = None,
    metrics_port: int | None = None,
) -> None:
    """Runs the process: keeps the server at the URL `server`, or its replicas at several URLs, separated by commas, in
    line with the promotions, until SIGTERM.

    Raises PortTaken.
    """
    from tentalis.inference.replicas.client import ReplicatedClient, inference_client, routers_of

    async def main(stop: threading.Event) -> None:
        async with inference_client(server) as client:
            policies = PolicyService(
                settings,
                client.replicas if isinstance(client, ReplicatedClient) else {client.base_url: client},
                client,
                server_id=server_id,
                promotion=promotion,
                dtype=dtype,
                routers=routers_of(client),
            )
            with served(Health(policies.metrics.exporter, policies.not_ready, policies.loop_watch.stuck), metrics_port):
                await policies.run(stop)

    watched = topology.named("policies").used_topics
    run_service("policies", ending_on_changes(settings, watched, lambda stop: asyncio.run(main(stop))))
