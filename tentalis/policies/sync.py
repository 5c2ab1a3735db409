"""Makes one inference server serve the promoted versions: find, check hash, load, compare canary, acknowledge."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from schemas.ids import parse_policy_name
from schemas.records import AssignmentAck, PolicyAck, PolicyUpdate
from schemas.tensors import float32_view, int32_view
from tentalis.inference.protocol import Float32, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.policies.core import PolicyLog, surplus
from tentalis.service import tracing
from tentalis.service.packages import MissingExtra
from tentalis.storage.errors import StorageError
from tentalis.storage.file_cache import FileCache
from tentalis.storage.location import BadLocation, Location
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

# The largest difference between the trainer's and a server's log-probs of the canary, by the server's precision.
CANARY_TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
WEIGHTS = "adapter_model.safetensors"
FIRST_RETRY_S, LONGEST_RETRY_S = 15.0, 600.0


ServerAck = PolicyAck | AssignmentAck


class AdapterServer(Protocol):
    """The part of an inference server that the sync needs. Every method raises InferenceError."""

    async def models(self) -> list[dict[str, Any]]: ...

    async def load_adapter(self, name: str, path: str, in_place: bool = False, sha256: str | None = None) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32: ...


class AdapterRejected(Exception):
    """A version that must not be served. The message is the reason, and becomes the acknowledgement's error."""

    def __init__(self, reason: str, canary_max_diff: float | None = None) -> None:
        super().__init__(reason)
        self.canary_max_diff = canary_max_diff


@dataclass(slots=True)
class _Refusal:
    reason: str
    pause: float
    again_at: float


def adapter_place(location: str) -> Location:
    """The place that the location of an update names. Raises AdapterRejected."""
    try:
        return Location.parse(location)
    except BadLocation as error:
        raise AdapterRejected(f"adapter {error}") from error


def check_weights(folder: Path, sha256: str) -> None:
    """Checks that the folder's weights have this sha256 (hex). Raises AdapterRejected."""
    try:
        found = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise AdapterRejected(
            f"{folder / WEIGHTS} cannot be read: {error.strerror}. Restore it, or, if it is its run's newest, move the "
            "rest of the folder away: the trainer's next start writes it again"
        ) from error
    if found != sha256:
        raise AdapterRejected(
            f"{folder / WEIGHTS} is damaged: it has sha256 {found}, the update says {sha256}. Restore the right file, "
            "or, if it is its run's newest, move the folder away: the trainer's next start writes it again"
        )


def canary_difference(expected: Float32, found: Float32) -> float:
    """The largest absolute difference of two sequences of log-probs [n]; the first token has no prefix and is left out.

    Infinite if they cannot be compared.
    """
    if len(expected) != len(found):
        return float("inf")
    difference = np.abs(found[1:].astype(np.float64) - expected[1:].astype(np.float64))
    return float(np.max(difference, initial=0.0)) if np.all(np.isfinite(difference)) else float("inf")


def declared_dtype(cards: Iterable[Mapping[str, Any]]) -> str:
    """The precision that the card of a server's base model declares, float32 if it declares none that is known."""
    declared = {card.get("dtype") for card in cards if card.get("parent") is None}
    return next((dtype for dtype in CANARY_TOLERANCES if declared == {dtype}), "float32")


class AdapterSync:
    """Brings one server in line with a PolicyLog, round by round.

    `acknowledge` writes the record and must also apply it to the log. `files`: where adapters from an object store are
    kept for a server that does not fetch them itself, which must see the same folder. `traces`: the trace context of
    each published version. `dtype`: the server's precision, which sets the tolerance of the canary; None: as its model
    cards declare it, else float32.
    """

    def __init__(
        self,
        server: AdapterServer,
        log_state: PolicyLog,
        server_id: str,
        acknowledge: Callable[[ServerAck], None],
        files: FileCache,
        traces: Mapping[str, str | None] = MappingProxyType({}),
        dtype: str | None = None,
    ) -> None:
        self._dtype = dtype
        self._traces = traces
        self._server = server
        self._log = log_state
        self._server_id = server_id
        self._acknowledge = acknowledge
        self._files = files
        self._loads_urls, self._declared = False, "float32"
        self._refusals: dict[str, _Refusal] = {}
        self.problem = ""
        """Problems of the last round: promoted versions that are not served, the reason, and the version that is served
        instead; empty if there are none."""

    async def round(self) -> None:
        """Loads missing versions, acknowledges new ones, unloads old ones.

        Raises ServerUnavailable: nothing was decided, try again later.
        """
        loaded = await self._loaded()
        serving, problems = [], []
        for policy in self._log.policies:
            promoted, served = self._log.promotion(policy).name, None
            for name in self._log.candidates(policy):
                if await self._serves(name, loaded):
                    served = name
                    serving.append(name)
                    break
            if served != promoted:
                alternative = "nor is another version" if served is None else f"{served} is served instead"
                problems.append(f"{promoted} is not served, {alternative}: {self._refusals[promoted].reason}")
        self.problem = "; ".join(problems)
        for name in self._log.assigned():
            if await self._holds(name, loaded):
                serving.append(name)
        for name in surplus(loaded, serving, self._log.kept_versions):
            log.info("unloading %s", name)
            await self._unload(name)

    async def load(self, update: PolicyUpdate) -> None:
        """Loads a version that is not served yet, with the usual checks. Raises AdapterRejected (a failed
        acknowledgement is on the log), ServerUnavailable."""
        if update.name in self._refusals and time.monotonic() < self._refusals[update.name].again_at:
            raise AdapterRejected(self._refusals[update.name].reason)
        loaded = await self._loaded()
        try:
            if update.name not in loaded:
                await self._load(update)
                loaded.add(update.name)
            await self._canary(update)
        except AdapterRejected as error:
            await self._refuse(update.name, error, PolicyAck, update.name in loaded)
            raise

    async def _loaded(self) -> set[str]:
        cards = await self._server.models()
        self._declared = declared_dtype(cards)
        self._loads_urls = any(card.get("loads_urls") is True for card in cards)
        return {str(card["id"]) for card in cards}

    async def _serves(self, name: str, loaded: set[str]) -> bool:
        """Returns True if the server serves `name` now; loads and acknowledges it if needed."""
        refusal = self._refusals.get(name)
        if refusal is not None and time.monotonic() < refusal.again_at:
            return False
        if name in loaded and self._log.acknowledged(name):
            return True
        with tracing.span("swap", parent=self._traces.get(name), policy=name):
            return await self._swap(name, loaded, PolicyAck)

    async def _holds(self, name: str, loaded: set[str]) -> bool:
        """Returns True if the server has the assigned `name` now; loads and acknowledges it if needed.

        A version that cannot be loaded is acknowledged with the reason, and its tasks get the served version.
        """
        refusal = self._refusals.get(name)
        if refusal is not None and time.monotonic() < refusal.again_at:
            return False
        if name in loaded and self._log.holds(name):
            return True
        with tracing.span("swap", parent=self._traces.get(name), policy=name):
            return await self._swap(name, loaded, AssignmentAck)

    async def _swap(self, name: str, loaded: set[str], kind: type[ServerAck]) -> bool:
        started = time.monotonic()
        try:
            update = self._published(name)
            if name not in loaded:
                await self._load(update)
                loaded.add(name)
            difference = await self._canary(update)
        except AdapterRejected as error:
            await self._refuse(name, error, kind, name in loaded)
            loaded.discard(name)
            return False
        self._refusals.pop(name, None)
        seconds = time.monotonic() - started
        self._acknowledge(self._ack(kind, name, None, difference, seconds))
        verb = "served" if kind is PolicyAck else "held for its assignments"
        log.info("%s is %s (%.2f s, canary difference %.1e)", name, verb, seconds, difference)
        return True

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

    async def _load(self, update: PolicyUpdate) -> None:
        place = adapter_place(update.location)
        try:
            if place.folder is not None:
                check_weights(place.folder, update.sha256)
                await self._server.load_adapter(update.name, str(place.folder))
            elif self._loads_urls:
                await self._server.load_adapter(update.name, place.url, sha256=update.sha256)
            else:
                with ExitStack() as use:
                    opened = self._files.opened(place, {WEIGHTS: update.sha256})
                    folder = await asyncio.to_thread(use.enter_context, opened)
                    await self._server.load_adapter(update.name, str(folder))
        except (RequestRefused, StorageError, MissingExtra) as error:
            raise AdapterRejected(str(error)) from error

    async def _canary(self, update: PolicyUpdate) -> float:
        try:
            found = await self._server.score(update.name, int32_view(update.canary.token_ids).tolist())
        except UnknownModel as error:
            raise ServerUnavailable(f"the server lost {update.name} after loading it: {error}") from error
        except RequestRefused as error:
            raise AdapterRejected(f"the canary cannot be scored: {error}") from error
        difference = canary_difference(float32_view(update.canary.logprobs), found)
        dtype = self._dtype or self._declared
        if not difference <= CANARY_TOLERANCES[dtype]:
            raise AdapterRejected(
                f"the canary's log-probs differ from the trainer's by {difference:.2g}, more than "
                f"{CANARY_TOLERANCES[dtype]:g} ({dtype}): the base model or the adapter differs from the trainer's",
                difference if np.isfinite(difference) else None,
            )
        return difference

    async def _refuse(self, name: str, error: AdapterRejected, kind: type[ServerAck], loaded: bool) -> None:
        before, reason = self._refusals.get(name), str(error)
        pause = FIRST_RETRY_S if before is None else min(LONGEST_RETRY_S, 2 * before.pause)
        self._refusals[name] = _Refusal(reason, pause, time.monotonic() + pause)
        if loaded:
            await self._unload(name)
        if before is None or before.reason != reason:
            log.error("%s is not served: %s", name, reason)
            self._acknowledge(self._ack(kind, name, reason, error.canary_max_diff, 0.0))

    async def _unload(self, name: str) -> None:
        try:
            await self._server.unload_adapter(name)
        except UnknownModel:
            log.info("%s was already unloaded", name)

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
