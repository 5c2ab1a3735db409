"""The adapters of one replica of a model server: loaded with their hash and canary checked, and unloaded."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schemas.records import PolicyUpdate
from schemas.tensors import float32_view, int32_view
from tentalis.inference.protocol import Float32, InferenceError, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.service.packages import MissingExtra
from tentalis.storage.errors import StorageError
from tentalis.storage.file_cache import FileCache
from tentalis.storage.location import BadLocation, Location
from tentalis.storage.version_files import ADAPTER_WEIGHTS, MODEL_WEIGHTS

log = logging.getLogger(__name__)

# The largest difference between the trainer's and a server's log-probs of the canary, by the server's precision.
CANARY_TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
FIRST_RETRY_S, LONGEST_RETRY_S = 15.0, 600.0


class AdapterServer(Protocol):
    """The part of an inference server, or of one replica of it, that the sync needs. Every method raises
    InferenceError."""

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


def weights_name(update: PolicyUpdate) -> str:
    """The name of the file with a version's weights."""
    return MODEL_WEIGHTS if update.is_whole_model else ADAPTER_WEIGHTS


def check_weights(folder: Path, update: PolicyUpdate) -> None:
    """Checks that the weights in the folder of a version are its own. Raises AdapterRejected."""
    sha256, file = update.sha256, folder / weights_name(update)
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise AdapterRejected(
            f"{file} cannot be read: {error.strerror}. Restore it, or, if it is its run's newest, move the "
            "rest of the folder away: the trainer's next start writes it again"
        ) from error
    if found != sha256:
        raise AdapterRejected(
            f"{file} is damaged: it has sha256 {found}, the update says {sha256}. Restore the right file, "
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


class ReplicaAdapters:
    """The adapters of one replica. `url`: its name in messages. `files`, `dtype`: see AdapterSync.

    `loaded`: the models that it listed last, and what was loaded since. `away`: the reason why its last call had no
    answer, "" if it had one.
    """

    def __init__(self, url: str, server: AdapterServer, files: FileCache, dtype: str | None) -> None:
        self.url = url
        self.loaded: set[str] = set()
        self.away = ""
        self._server, self._files, self._dtype = server, files, dtype
        self._loads_urls, self._loads_models, self._declared = False, False, "float32"
        self._verified: set[str] = set()
        self._refusals: dict[str, _Refusal] = {}

    async def refresh(self) -> bool:
        """Lists its models. Returns False if it does not answer; `away` then has the reason."""
        try:
            cards = await self._server.models()
        except InferenceError as error:
            self.away = str(error)
            return False
        self.away = ""
        self._declared = declared_dtype(cards)
        self._loads_urls = any(card.get("loads_urls") is True for card in cards)
        self._loads_models = any(card.get("loads_models") is True for card in cards)
        self.loaded = {str(card["id"]) for card in cards}
        self._verified &= self.loaded
        return True

    def has(self, name: str, *, trusted: bool) -> bool:
        """True if it has `name` loaded and verified. `trusted`: a loaded version needs no canary of this process."""
        return name in self.loaded and (trusted or name in self._verified)

    def refusal(self, name: str) -> str | None:
        """The reason why `name` is not tried now, None if it may be tried."""
        found = self._refusals.get(name)
        return found.reason if found is not None and time.monotonic() < found.again_at else None

    async def load(self, update: PolicyUpdate) -> float:
        """Loads a version, unless it is loaded already, and returns the difference of its canary.

        Raises AdapterRejected, after which it is not loaded and `refusal` has the reason for a while, and
        ServerUnavailable.
        """
        try:
            if update.name not in self.loaded:
                await self._load(update)
                self.loaded.add(update.name)
            difference = await self._canary(update)
        except AdapterRejected as error:
            self.refuse(update.name, str(error))
            await self.unload(update.name)
            raise
        except ServerUnavailable as error:
            self.away = str(error)
            raise
        self._refusals.pop(update.name, None)
        self._verified.add(update.name)
        return difference

    def refuse(self, name: str, reason: str) -> None:
        """Remembers that `name` cannot be loaded; each time for twice as long."""
        before = self._refusals.get(name)
        pause = FIRST_RETRY_S if before is None else min(LONGEST_RETRY_S, 2 * before.pause)
        self._refusals[name] = _Refusal(reason, pause, time.monotonic() + pause)

    async def unload(self, name: str) -> None:
        """Unloads a version, if it is loaded; calls in flight finish with it. Raises ServerUnavailable,
        RequestRefused."""
        if name not in self.loaded:
            return
        try:
            await self._server.unload_adapter(name)
        except UnknownModel:
            log.info("%s was already unloaded", name)
        except ServerUnavailable as error:
            self.away = str(error)
            raise
        self.loaded.discard(name)
        self._verified.discard(name)

    async def _load(self, update: PolicyUpdate) -> None:
        if update.is_whole_model and not self._loads_models:
            raise AdapterRejected(
                f"{update.name} is a whole model (its run has lora: null), and the server loads adapters only. Serve "
                "it with `tentalis serve model`, or write it to a folder with `tentalis policy export` and start the "
                "server on that"
            )
        place = adapter_place(update.location)
        try:
            if place.folder is not None:
                check_weights(place.folder, update)
                await self._server.load_adapter(update.name, str(place.folder))
            elif self._loads_urls:
                await self._server.load_adapter(update.name, place.url, sha256=update.sha256)
            else:
                with ExitStack() as use:
                    opened = self._files.opened(place, {weights_name(update): update.sha256})
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
