"""`tentalis serve policies`: the guard that promotes and the sync of one server, both living from the log alone, and
the owner of the dead letters of the control topics.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from schemas import topics
from schemas.records import PolicyAck, PolicyUpdate, Promotion
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.dlq.owner import ControlOwner
from tentalis.health import Health, Turns, served
from tentalis.heartbeat import Heart
from tentalis.inference.protocol import ServerUnavailable
from tentalis.kafka import Publisher, make_codec, now_ms
from tentalis.metrics import Exporter
from tentalis.policies.core import PolicyLog
from tentalis.policies.sync import AdapterServer, Sync
from tentalis.reading import Reader
from tentalis.service import run_service

log = logging.getLogger(__name__)

POLL_S = 0.1
# How soon a server that lost its adapters (it was restarted) is noticed.
CHECK_SERVER_S = 2.0
ALWAYS = "always"
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
        exporter.read(metrics.POLICIES_SERVER_UP, lambda: float(server_up()))

    def acknowledged(self, ack: PolicyAck) -> None:
        """An acknowledgement is on the log."""
        self._acks.labels("ok" if ack.ok else "refused").inc()
        if ack.ok:
            self._seconds.observe(ack.load_seconds)
        if ack.canary_max_diff is not None:
            self._canary.set(ack.canary_max_diff)

    def synced(self, log_state: PolicyLog) -> None:
        """The server was looked at."""
        for policy in log_state.policies:
            self._promoted.labels(policy).set(log_state.promotion(policy).version)
            version = log_state.served_version(policy)
            if version is not None:
                self._served.labels(policy).set(version)


class Policies:
    """The process without its signals. `promotion`: always | manual | none (the last two leave it to others)."""

    def __init__(self, settings: Settings, server: AdapterServer, *, server_id: str, promotion: str) -> None:
        codec = make_codec(settings)
        self._promotion = promotion
        self._by = f"guard/{server_id}"
        self._log = PolicyLog(server_id)
        self._reader = Reader(settings, [topics.POLICIES, topics.POLICY_ACKS], codec)
        self._publisher = Publisher(settings, f"tentalis/policies/{server_id}", codec)
        self._owner = ControlOwner(settings, codec, self._publisher)
        self._traces: dict[str, str | None] = {}
        self._sync = Sync(server, self._log, server_id, self._acknowledge, self._traces)
        self._promoting: dict[str, int] = {}
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
        if self._promotion == ALWAYS:
            await asyncio.to_thread(self._promote)
        if found or time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_SERVER_S
            await self._round()
        self._heart.beat(self._away or self._sync.trouble)

    def _promote(self) -> None:
        due = [u for u in self._log.due_promotions() if self._promoting.get(u.policy, -1) < u.version]
        for update in due:
            log.info("promoting %s", update.name)
            self._publisher.send(topics.POLICIES, self._promotion_of(update), traceparent=self._traces.get(update.name))
            self._promoting[update.policy] = update.version
        if due:
            self._publisher.flush()

    def _promotion_of(self, update: PolicyUpdate) -> Promotion:
        return Promotion(
            policy=update.policy,
            version=update.version,
            event_time=now_ms(),
            sha256=update.sha256,
            mode=ALWAYS,
            by=self._by,
            reason=f"step {update.step} of run {update.run_id}",
        )

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
    promotion: str = ALWAYS,
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
