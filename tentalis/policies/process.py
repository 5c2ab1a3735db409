"""`tentalis serve policies`: the guard that promotes and the sync of one server, both living from the log alone, and
the owner of the dead letters of the control topics.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from schemas import topics
from schemas.records import EvalResult, PolicyAck, PolicyUpdate, Promotion
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.dlq.owner import ControlOwner
from tentalis.guard import Mode
from tentalis.health import Health, Turns, served
from tentalis.heartbeat import Heart
from tentalis.inference.protocol import Inference, InferenceError, ServerUnavailable
from tentalis.kafka import Publisher, make_codec
from tentalis.metrics import Exporter
from tentalis.policies.core import PolicyLog
from tentalis.policies.guardian import Guardian
from tentalis.policies.live import Live
from tentalis.policies.sync import AdapterServer, Refused, Sync
from tentalis.reading import Reader
from tentalis.service import run_service

log = logging.getLogger(__name__)

POLL_S = 0.1
# How soon a server that lost its adapters (it was restarted) is noticed.
CHECK_SERVER_S = 2.0
# `always` promotes whatever its run says, `run` as the run's configuration says; anything else leaves it to others.
ALWAYS, RUN = "always", "run"
# How often what is served is held against its guard, and how long a candidate waits that could not be tried.
WATCH_S, TRY_AGAIN_S = 2.0, 5.0
# Loading a large adapter and its canary are one turn of the loop.
STUCK_S = 900.0


class PolicyMetrics:
    """What the process exports. `server_up`: whether the inference server answered when it was last asked."""

    def __init__(self, server_up: Callable[[], bool]) -> None:
        self.exporter = exporter = Exporter("policies")
        self._acks = exporter.counter(metrics.POLICIES_ACKS)
        self._seconds = exporter.histogram(metrics.POLICIES_SWAP)
        self._canary = exporter.gauge(metrics.POLICIES_CANARY)
        self._served = exporter.gauge(metrics.POLICIES_SERVED)
        self._promoted = exporter.gauge(metrics.POLICIES_PROMOTED)
        self._verdicts = exporter.counter(metrics.POLICIES_VERDICTS)
        exporter.read(metrics.POLICIES_SERVER_UP, lambda: float(server_up()))

    def acknowledged(self, ack: PolicyAck) -> None:
        """An acknowledgement is on the log."""
        self._acks.labels("ok" if ack.ok else "refused").inc()
        if ack.ok:
            self._seconds.observe(ack.load_seconds)
        if ack.canary_max_diff is not None:
            self._canary.set(ack.canary_max_diff)

    def judged(self, verdict: EvalResult) -> None:
        """The guard has spoken."""
        self._verdicts.labels("passed" if verdict.passed else "refused").inc()

    def synced(self, log_state: PolicyLog) -> None:
        """The server was looked at."""
        for policy in log_state.policies:
            self._promoted.labels(policy).set(log_state.promotion(policy).version)
            version = log_state.served_version(policy)
            if version is not None:
                self._served.labels(policy).set(version)


class PolicyServer(AdapterServer, Inference, Protocol):
    """Loads adapters and answers with them."""


class Policies:
    """The process without its signals. `promotion`: run | always | manual | none (the last two leave it to others)."""

    def __init__(self, settings: Settings, server: PolicyServer, *, server_id: str, promotion: str) -> None:
        self._settings, self._codec = settings, make_codec(settings)
        codec = self._codec
        self._promotion = promotion
        self._by = f"guard/{server_id}"
        self._log = PolicyLog(server_id)
        # Runs and verdicts first: what they say of a version must be known when the version is.
        deciding = [topics.RUNS, topics.EVALS] if promotion == RUN else []
        self._reader = Reader(settings, [*deciding, topics.POLICIES, topics.POLICY_ACKS], codec)
        self._publisher = Publisher(settings, f"tentalis/policies/{server_id}", codec)
        self._owner = ControlOwner(settings, codec, self._publisher)
        self._traces: dict[str, str | None] = {}
        self._sync = Sync(server, self._log, server_id, self._acknowledge, self._traces)
        self._guardian = Guardian(settings, codec, server, self._log, self._by)
        self._promoting: dict[str, int] = {}
        self._trial: asyncio.Task[EvalResult | None] | None = None
        self._try_at, self._watch_at = 0.0, 0.0
        self._live: Live | None = None
        self._check_at = 0.0
        self._away = ""
        self._heart = Heart()
        self._asked = False
        self.turns = Turns(STUCK_S)
        self.metrics = PolicyMetrics(lambda: self._asked and not self._away)

    def not_ready(self) -> str | None:
        """Why a promotion would not be served now."""
        if not self._reader.caught_up:
            return "promotions and acknowledgements are not read to their end yet"
        if not self._asked:
            return "the inference server was not asked yet"
        return self._away or self._sync.trouble or None

    async def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        try:
            while not stop.is_set():
                await self.step()
        finally:
            if self._trial is not None:
                self._trial.cancel()
            if self._live is not None:
                self._live.close()
            self._reader.close()
            self._owner.close()

    async def step(self) -> None:
        """Takes in what is new; promotes and syncs where due. What is no record is kept as a dead letter.

        Raises TooManyDead and what else `ControlOwner.step` raises.
        """
        self.turns.turned()
        await asyncio.to_thread(self._owner.step)
        found = await asyncio.to_thread(self._reader.poll, POLL_S)
        for stored, record in found:
            self._log.apply(record, stored.offset)
            if isinstance(record, PolicyUpdate):
                self._traces[record.name] = tracing.traceparent_of(stored.headers)
        if not self._reader.caught_up:
            return
        if self._promotion in (ALWAYS, RUN):
            await asyncio.to_thread(self._promote)
        if self._promotion == RUN:
            await self._guard()
        if found or time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_SERVER_S
            await self._round()
        self._heart.beat(self._away or self._sync.trouble)

    def _promote(self) -> None:
        always = self._promotion == ALWAYS
        due = [u for u in self._log.due_promotions(always=always) if self._promoting.get(u.policy, -1) < u.version]
        for update in due:
            log.info("promoting %s", update.name)
            mode = Mode.ALWAYS if always else self._log.rule(update).mode
            self._decide(self._guardian.promoted(update, mode), self._traces.get(update.name))
            self._promoting[update.policy] = update.version

    def _decide(self, record: Promotion | EvalResult, traceparent: str | None = None) -> None:
        """Writes a decision and takes it in; the promotion counts when it is read back, with its place on the log."""
        topic = topics.POLICIES if isinstance(record, Promotion) else topics.EVALS
        self._publisher.send(topic, record, traceparent=traceparent)
        self._publisher.flush()
        if isinstance(record, EvalResult):
            self._log.apply(record, -1)
            self.metrics.judged(record)

    async def _guard(self) -> None:
        """One candidate at a time is tried beside everything else; what is served is watched."""
        if self._trial is not None and self._trial.done():
            trial, self._trial = self._trial, None
            self._tried(trial)
        for update in self._log.refused():
            if self._promoting.get(update.policy, -1) < update.version:
                self._promoting[update.policy] = update.version
                await asyncio.to_thread(self._decide, self._guardian.decision(update))
        candidates = self._log.untried()
        if candidates and self._trial is None and time.monotonic() >= self._try_at:
            self._trial = asyncio.create_task(self._try(candidates[0]))
        if time.monotonic() >= self._watch_at and (guarded := self._log.guarded()):
            self._watch_at = time.monotonic() + WATCH_S
            await asyncio.to_thread(self._watch, guarded)

    async def _try(self, update: PolicyUpdate) -> EvalResult | None:
        log.info("trying %s", update.name)
        await self._sync.load(update)
        return await self._guardian.tried(update)

    def _tried(self, trial: "asyncio.Task[EvalResult | None]") -> None:
        self._try_at = time.monotonic() + TRY_AGAIN_S
        try:
            verdict = trial.result()
        except (InferenceError, Refused) as error:
            log.warning("the candidate cannot be tried, again in %g s: %s", TRY_AGAIN_S, error)
            return
        if verdict is None:
            log.info("there is nothing to try a candidate on: no task of the policy is on the log yet")
            return
        self._try_at = 0.0
        (log.info if verdict.passed else log.error)("%s: %s", verdict.policy, verdict.details or "passed the guard")
        self._decide(verdict)

    def _watch(self, guarded: list[PolicyUpdate]) -> None:
        if self._live is None:
            self._live = Live(self._settings, self._codec)
        self._live.poll()
        for update in guarded:
            found = self._guardian.fallen(update, self._live.answers)
            if found is None:
                continue
            verdict, back = found
            # A fall is judged once: were its verdict there first and this process killed then, nobody would roll back.
            if back is not None:
                self._decide(back)
            self._decide(verdict)

    async def _round(self) -> None:
        try:
            await self._sync.round()
        except ServerUnavailable as error:
            if not self._away:
                log.warning("the inference server is away: %s", error)
            self._away = f"the inference server is away: {error}"
        else:
            if self._away:
                log.info("the inference server is back")
            self._away = ""
        self._asked = True
        self.metrics.synced(self._log)

    def _acknowledge(self, ack: PolicyAck) -> None:
        self._publisher.send(topics.POLICY_ACKS, ack, traceparent=self._traces.get(ack.name))
        self._publisher.flush()
        self._log.apply(ack, -1)
        self.metrics.acknowledged(ack)


def serve(
    settings: Settings,
    *,
    server: str,
    server_id: str = "local",
    promotion: str = RUN,
    metrics_port: int | None = None,
) -> None:
    """The process: keeps the server at the URL `server` in line with the promotions, until SIGTERM.

    Raises PortTaken.
    """
    from tentalis.inference.client import OpenAIClient

    async def main(stop: threading.Event) -> None:
        async with OpenAIClient(server) as client:
            policies = Policies(settings, client, server_id=server_id, promotion=promotion)
            with served(Health(policies.metrics.exporter, policies.not_ready, policies.turns.stuck), metrics_port):
                await policies.run(stop)

    run_service("policies", lambda stop: asyncio.run(main(stop)))
