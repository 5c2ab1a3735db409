"""Makes one inference server serve what is promoted: find, check the hash, load, compare the canary, acknowledge."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

import numpy as np

from schemas.ids import parse_policy_name
from schemas.records import PolicyAck, PolicyUpdate
from schemas.tensors import float32_view, int32_view
from tentalis import tracing
from tentalis.inference.protocol import Float32, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.kafka import now_ms
from tentalis.policies.core import PolicyLog, surplus

log = logging.getLogger(__name__)

CANARY_TOLERANCE = 1e-3
WEIGHTS = "adapter_model.safetensors"
FIRST_RETRY_S, LONGEST_RETRY_S = 15.0, 600.0


class AdapterServer(Protocol):
    """What is needed of an inference server. Every method raises InferenceError."""

    async def models(self) -> list[dict[str, Any]]: ...

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32: ...


class Refused(Exception):
    """A version that must not be served: the message says why, and becomes the acknowledgement's error."""

    def __init__(self, reason: str, canary_max_diff: float | None = None) -> None:
        super().__init__(reason)
        self.canary_max_diff = canary_max_diff


@dataclass(slots=True)
class _Refusal:
    reason: str
    pause: float
    again_at: float


def adapter_folder(location: str) -> Path:
    """The folder that a `file:` location names. Raises Refused for other locations."""
    url = urlparse(location)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise Refused(f"the location {location!r} is not a file: URL; only those can be loaded here")
    return Path(unquote(url.path))


def check_weights(folder: Path, sha256: str) -> None:
    """Raises Refused unless the folder's weights have this sha256 (hex)."""
    try:
        found = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise Refused(
            f"{folder / WEIGHTS} cannot be read: {error.strerror}. Put it back, or, if it is its run's newest, move "
            "what is left of the folder away: the trainer's next start writes it again"
        ) from error
    if found != sha256:
        raise Refused(
            f"{folder / WEIGHTS} is damaged: it has sha256 {found}, the update says {sha256}. Put the right file back, "
            "or, if it is its run's newest, move the folder away: the trainer's next start writes it again"
        )


def canary_difference(expected: Float32, found: Float32) -> float:
    """The largest absolute difference of two sequences of log-probs [n]; the first token has no prefix and is left out.

    Infinite where they cannot be compared.
    """
    if len(expected) != len(found):
        return float("inf")
    difference = np.abs(found[1:].astype(np.float64) - expected[1:].astype(np.float64))
    return float(np.max(difference, initial=0.0)) if np.all(np.isfinite(difference)) else float("inf")


class Sync:
    """Brings one server in line with a PolicyLog; to be called again and again.

    `acknowledge` writes the record and must also apply it to the log. `traces`: with which a version was published.
    """

    def __init__(
        self,
        server: AdapterServer,
        log_state: PolicyLog,
        server_id: str,
        acknowledge: Callable[[PolicyAck], None],
        traces: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        self._traces = traces
        self._server = server
        self._log = log_state
        self._server_id = server_id
        self._acknowledge = acknowledge
        self._refusals: dict[str, _Refusal] = {}
        self.trouble = ""
        """Of the last round: which promoted versions are not served, why, and what is served instead; or nothing."""

    async def round(self) -> None:
        """Loads what is missing, acknowledges what is new, unloads what is old.

        Raises ServerUnavailable: nothing was decided, try again later.
        """
        loaded = {str(card["id"]) for card in await self._server.models()}
        serving, troubles = [], []
        for policy in self._log.policies:
            promoted, served = self._log.promotion(policy).name, None
            for name in self._log.candidates(policy):
                if await self._serves(name, loaded):
                    served = name
                    serving.append(name)
                    break
            if served != promoted:
                instead = "no version of it is" if served is None else f"{served} is served instead"
                troubles.append(f"{promoted} is not served, {instead}: {self._refusals[promoted].reason}")
        self.trouble = "; ".join(troubles)
        for name in surplus(loaded, serving):
            log.info("unloading %s", name)
            await self._unload(name)

    async def load(self, update: PolicyUpdate) -> None:
        """Has the server load a version that nobody is served yet, checked as any. Raises Refused (a failed
        acknowledgement is on the log), ServerUnavailable."""
        if update.name in self._refusals and time.monotonic() < self._refusals[update.name].again_at:
            raise Refused(self._refusals[update.name].reason)
        loaded = {str(card["id"]) for card in await self._server.models()}
        try:
            if update.name not in loaded:
                await self._load(update)
                loaded.add(update.name)
            await self._canary(update)
        except Refused as error:
            await self._refuse(update.name, str(error), error.canary_max_diff, update.name in loaded)
            raise

    async def _serves(self, name: str, loaded: set[str]) -> bool:
        """Whether the server serves `name` now; loads and acknowledges it where needed."""
        refusal = self._refusals.get(name)
        if refusal is not None and time.monotonic() < refusal.again_at:
            return False
        if name in loaded and self._log.acknowledged(name):
            return True
        with tracing.span("swap", parent=self._traces.get(name), policy=name):
            return await self._swapped(name, loaded)

    async def _swapped(self, name: str, loaded: set[str]) -> bool:
        started = time.monotonic()
        try:
            update = self._published(name)
            if name not in loaded:
                await self._load(update)
                loaded.add(name)
            difference = await self._canary(update)
        except Refused as error:
            await self._refuse(name, str(error), error.canary_max_diff, name in loaded)
            loaded.discard(name)
            return False
        self._refusals.pop(name, None)
        seconds = time.monotonic() - started
        self._acknowledge(self._ack(name, None, difference, seconds))
        log.info("%s is served (%.2f s, canary difference %.1e)", name, seconds, difference)
        return True

    def _published(self, name: str) -> PolicyUpdate:
        update = self._log.update(name)
        if update is None:
            raise Refused(f"{name} is promoted, but was never published")
        promotion = self._log.promotion(update.policy)
        if promotion.name == name and promotion.sha256 != update.sha256:
            raise Refused(f"{name} is promoted with sha256 {promotion.sha256}, but published with {update.sha256}")
        return update

    async def _load(self, update: PolicyUpdate) -> None:
        folder = adapter_folder(update.location)
        check_weights(folder, update.sha256)
        try:
            await self._server.load_adapter(update.name, str(folder))
        except RequestRefused as error:
            raise Refused(str(error)) from error

    async def _canary(self, update: PolicyUpdate) -> float:
        try:
            found = await self._server.score(update.name, int32_view(update.canary.token_ids).tolist())
        except UnknownModel as error:
            raise ServerUnavailable(f"the server lost {update.name} while it was loaded: {error}") from error
        except RequestRefused as error:
            raise Refused(f"the canary cannot be scored: {error}") from error
        difference = canary_difference(float32_view(update.canary.logprobs), found)
        if not difference <= CANARY_TOLERANCE:
            raise Refused(
                f"the canary's log-probs differ from the trainer's by {difference:.2g}, more than "
                f"{CANARY_TOLERANCE:g}: another base model, or an adapter that is not what the trainer had",
                difference if np.isfinite(difference) else None,
            )
        return difference

    async def _refuse(self, name: str, reason: str, difference: float | None, loaded: bool) -> None:
        before = self._refusals.get(name)
        pause = FIRST_RETRY_S if before is None else min(LONGEST_RETRY_S, 2 * before.pause)
        self._refusals[name] = _Refusal(reason, pause, time.monotonic() + pause)
        if loaded:
            await self._unload(name)
        if before is None or before.reason != reason:
            log.error("%s is not served: %s", name, reason)
            self._acknowledge(self._ack(name, reason, difference, 0.0))

    async def _unload(self, name: str) -> None:
        try:
            await self._server.unload_adapter(name)
        except UnknownModel:
            log.info("%s was gone already", name)

    def _ack(self, name: str, error: str | None, difference: float | None, seconds: float) -> PolicyAck:
        update = self._log.update(name)
        policy, version = parse_policy_name(name)
        return PolicyAck(
            server_id=self._server_id,
            policy=policy,
            version=version,
            event_time=now_ms(),
            sha256=self._log.promotion(policy).sha256 if update is None else update.sha256,
            ok=error is None,
            error=error,
            canary_max_diff=difference,
            load_seconds=seconds,
        )
