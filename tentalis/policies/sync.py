"""Makes the replicas of one inference server serve the promoted versions: find, load on each replica, acknowledge."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from schemas.ids import parse_policy_name
from schemas.records import AssignmentAck, PolicyAck, PolicyUpdate
from tentalis.inference.protocol import ServerUnavailable
from tentalis.policies.core import PolicyLog, surplus
from tentalis.policies.replica import AdapterRejected, AdapterServer, ReplicaAdapters
from tentalis.service import tracing
from tentalis.storage.file_cache import FileCache
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

ServerAck = PolicyAck | AssignmentAck


class AdapterSync:
    """Brings the replicas of one server in line with a PolicyLog, round by round.

    A version is acknowledged once every replica that answers has loaded it and passed its canary, or has refused it,
    and at least one has it. Replicas load one after the other, so at most one is slowed down. One that was away, or
    lost its adapters, gets them in the next round. Until then no client asks it for them: it does not list them.

    `servers`: the replicas by URL. `acknowledge` writes the record and must also apply it to the log. `files`: where
    adapters from an object store are kept for a server that does not fetch them itself, which must see the same folder.
    `traces`: the trace context of each published version. `dtype`: the server's precision, which sets the tolerance of
    the canary; None: as its model cards declare it, else float32.
    """

    def __init__(
        self,
        servers: Mapping[str, AdapterServer],
        log_state: PolicyLog,
        server_id: str,
        acknowledge: Callable[[ServerAck], None],
        files: FileCache,
        traces: Mapping[str, str | None] = MappingProxyType({}),
        dtype: str | None = None,
    ) -> None:
        self.replicas = tuple(ReplicaAdapters(url, server, files, dtype) for url, server in servers.items())
        self._traces = traces
        self._log = log_state
        self._server_id = server_id
        self._acknowledge = acknowledge
        # The reason of each failed acknowledgement that was written last, by version.
        self._said: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self.problem = ""
        """Problems of the last round: promoted versions that are not served, the reason, and the version that is served
        instead; replicas that do not answer or lack a served version; empty if there are none."""

    async def round(self) -> None:
        """Loads missing versions, acknowledges new ones, unloads old ones.

        Raises ServerUnavailable: no replica answers. Nothing was decided, try again later.
        """
        async with self._turn:
            await self._refresh()
            serving, problems = [], []
            for policy in self._log.policies:
                promoted, served = self._log.promotion(policy).name, None
                for name in self._log.candidates(policy):
                    if await self._serves(name, PolicyAck):
                        served = name
                        serving.append(name)
                        problems += self._lacking(name)
                        break
                if served != promoted:
                    alternative = "nor is another version" if served is None else f"{served} is served instead"
                    problems.append(f"{promoted} is not served, {alternative}: {self._reason(promoted)}")
            for name in self._log.assigned():
                if await self._serves(name, AssignmentAck):
                    serving.append(name)
            away = [f"the replica {each.url} does not answer: {each.away}" for each in self.replicas if each.away]
            self.problem = "; ".join(problems + away)
            await self._unload_surplus(serving)

    async def load(self, update: PolicyUpdate) -> None:
        """Loads a version that is not served yet, with the usual checks, on every replica that answers. Raises
        AdapterRejected if none has it then (a failed acknowledgement is on the log), ServerUnavailable."""
        async with self._turn:
            await self._refresh()
            able = [each for each in self._reachable() if each.refusal(update.name) is None]
            if not able:
                raise AdapterRejected(self._reason(update.name))
            difference, error = await self._load_on(able, update)
            if difference is None:
                if error is None:
                    raise ServerUnavailable(self._reason(update.name))
                self._refused(update.name, error, PolicyAck)
                raise error

    async def _refresh(self) -> None:
        """Lists the models of the replicas. Raises ServerUnavailable if none answers."""
        answered = await asyncio.gather(*(replica.refresh() for replica in self.replicas))
        if not any(answered):
            raise ServerUnavailable("; ".join(replica.away for replica in self.replicas))

    def _reachable(self) -> list[ReplicaAdapters]:
        return [replica for replica in self.replicas if not replica.away]

    async def _serves(self, name: str, kind: type[ServerAck]) -> bool:
        """Returns True if a replica has `name` now; loads it where it is missing, and acknowledges it if needed.

        A version that cannot be loaded anywhere is acknowledged with the reason.
        """
        acknowledged = self._log.acknowledged(name) if kind is PolicyAck else self._log.holds(name)
        # The acknowledgement of a server with a single replica is of that replica.
        trusted = acknowledged and len(self.replicas) == 1
        able = [each for each in self._reachable() if each.refusal(name) is None]
        had = [each for each in able if each.has(name, trusted=trusted)]
        missing = [each for each in able if each not in had] if acknowledged else able
        if not missing:
            return bool(had)
        with tracing.span("swap", parent=self._traces.get(name), policy=name):
            lost = all(name not in each.loaded for each in able)
            return await self._swap(name, missing, kind, acknowledge=not acknowledged or lost, held=bool(had))

    async def _swap(
        self, name: str, missing: list[ReplicaAdapters], kind: type[ServerAck], *, acknowledge: bool, held: bool
    ) -> bool:
        """Loads `name` on the replicas that miss it. Returns True if a replica has it then. `held`: another has it."""
        started = time.monotonic()
        try:
            update = self._published(name)
        except AdapterRejected as error:
            for replica in missing:
                replica.refuse(name, str(error))
                await replica.unload(name)
            self._refused(name, error, kind)
            return False
        difference, rejected = await self._load_on(missing, update)
        if difference is None:
            if held:
                return True
            if not self._reachable():
                raise ServerUnavailable("; ".join(replica.away for replica in self.replicas))
            if rejected is not None:
                self._refused(name, rejected, kind)
            return False
        self._said.pop(name, None)
        if acknowledge:
            seconds = time.monotonic() - started
            self._acknowledge(self._ack(kind, name, None, difference, seconds))
            verb = "served" if kind is PolicyAck else "held for its assignments"
            log.info("%s is %s (%.2f s, canary difference %.1e)", name, verb, seconds, difference)
        return True

    async def _load_on(
        self, replicas: list[ReplicaAdapters], update: PolicyUpdate
    ) -> tuple[float | None, AdapterRejected | None]:
        """Loads a version on replicas, one after the other. Returns the largest difference of the canaries, None if no
        replica has it, and the last rejection."""
        differences, rejection = [], None
        for replica in replicas:
            try:
                differences.append(await replica.load(update))
            except AdapterRejected as error:
                rejection = error
                if len(self.replicas) > 1:
                    log.error("%s is not on the replica %s: %s", update.name, replica.url, error)
            except ServerUnavailable as error:
                log.warning("%s cannot be loaded%s now: %s", update.name, self._at(replica), error)
        return max(differences, default=None), rejection

    async def _unload_surplus(self, serving: list[str]) -> None:
        """Unloads old versions. Raises ServerUnavailable if no replica answers any more."""
        for replica in self._reachable():
            for name in surplus(replica.loaded, serving, self._log.kept_versions):
                log.info("unloading %s%s", name, self._at(replica))
                try:
                    await replica.unload(name)
                except ServerUnavailable as error:
                    log.warning("%s cannot be unloaded%s now: %s", name, self._at(replica), error)
                    break
        if not self._reachable():
            raise ServerUnavailable("; ".join(replica.away for replica in self.replicas))

    def _at(self, replica: ReplicaAdapters) -> str:
        return f" on {replica.url}" if len(self.replicas) > 1 else ""

    def _reason(self, name: str) -> str:
        """The reasons why `name` cannot be loaded, each once."""
        reasons = [reason for each in self.replicas if (reason := each.refusal(name) or each.away)]
        return "; ".join(dict.fromkeys(reasons)) or self._said.get(name, "it is not loaded yet")

    def _lacking(self, name: str) -> list[str]:
        """The replicas that answer and cannot have the served `name`."""
        refusals = ((each.url, each.refusal(name)) for each in self._reachable())
        return [f"the replica {url} has no {name}: {reason}" for url, reason in refusals if reason is not None]

    def _published(self, name: str) -> PolicyUpdate:
        update = self._log.update(name)
        if update is None:
            raise AdapterRejected(f"{name} is to be served, but was never published")
        promotion = self._log.promotion(update.policy) if update.policy in self._log.policies else None
        if promotion is not None and promotion.name == name and promotion.sha256 != update.sha256:
            raise AdapterRejected(
                f"{name} is promoted with sha256 {promotion.sha256}, but published with {update.sha256}"
            )
        return update

    def _refused(self, name: str, error: AdapterRejected, kind: type[ServerAck]) -> None:
        """Writes a failed acknowledgement, once per reason."""
        reason = str(error)
        if self._said.get(name) != reason:
            self._said[name] = reason
            log.error("%s is not served: %s", name, reason)
            self._acknowledge(self._ack(kind, name, reason, error.canary_max_diff, 0.0))

    def _ack(
        self, kind: type[ServerAck], name: str, error: str | None, difference: float | None, seconds: float
    ) -> ServerAck:
        update = self._log.update(name)
        policy, version = parse_policy_name(name)
        return kind(
            server_id=self._server_id,
            policy=policy,
            version=version,
            event_time=now_ms(),
            sha256=self._sha256(name) if update is None else update.sha256,
            ok=error is None,
            error=error,
            canary_max_diff=difference,
            load_seconds=seconds,
        )

    def _sha256(self, name: str) -> str:
        """The weights that a version which was never published should have, as its promotion says."""
        policy, _ = parse_policy_name(name)
        return self._log.promotion(policy).sha256 if policy in self._log.policies else "unknown"
