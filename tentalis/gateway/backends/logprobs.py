"""Measures which log-probs the replicas of the backends give, so that a wrong declaration trains on nothing.

A replica is measured when the gateway starts, and again when it has been away: it may have other flags then.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from schemas.records import LogprobsMode
from tentalis.gateway.settings import BackendSettings
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused, ServerUnavailable

log = logging.getLogger(__name__)

_WATCH_S, _RETRY_S = 10.0, 1.0
_TIMEOUT_S = 30.0
_SETTLE_S = 2.0
"""Longest wait of an answer for the measurement of its replica."""


@dataclass(slots=True)
class _ReplicaLogprobs:
    """A replica that serves policies. `measured`: the mode to record, None while it is not known; `known`: set once it
    is."""

    backend: BackendSettings
    client: OpenAIClient
    measured: LogprobsMode | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)
    told: str = ""


class LogprobsChecks:
    """The measured distributions of the log-probs of all replicas that serve policies. `keys`: the API key of each
    backend, by its name. Close it at the end."""

    def __init__(self, backends: Sequence[BackendSettings], keys: Mapping[str, str | None]) -> None:
        self._replicas = {
            (backend.name, url): _ReplicaLogprobs(
                backend, OpenAIClient(url, keys.get(backend.name), timeout=_TIMEOUT_S)
            )
            for backend in backends
            if backend.server_id is not None
            for url in backend.base_urls
        }
        self._untried = {url for _, url in self._replicas}
        self.begun = not self._replicas
        """True once a replica is measured, or each has been tried."""

    def mode(self, backend: BackendSettings, url: str) -> LogprobsMode | None:
        """The distribution of the log-probs of the backend's replica at `url`: as measured, or as declared if it cannot
        be measured or serves no policies. None while it is not known."""
        replica = self._replicas.get((backend.name, url))
        return backend.logprobs_mode if replica is None else replica.measured

    async def settled_mode(self, backend: BackendSettings, url: str) -> LogprobsMode | None:
        """Like `mode`, but waits a moment for a replica that has just come back and is being measured."""
        replica = self._replicas.get((backend.name, url))
        if replica is not None and replica.measured is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.known.wait(), _SETTLE_S)
        return self.mode(backend, url)

    async def run(self) -> None:
        """Measures the replicas, and measures again those that have been away, until cancelled."""
        await asyncio.gather(*(self._watch(replica) for replica in self._replicas.values()))

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(replica.client.aclose() for replica in self._replicas.values()))

    async def _watch(self, replica: _ReplicaLogprobs) -> None:
        while True:
            if replica.measured is None or await self._is_away(replica):
                replica.measured = None
                replica.known.clear()
                await self._measure(replica)
                if replica.measured is not None:
                    replica.known.set()
                self._untried.discard(replica.client.base_url)
                self.begun = self.begun or replica.measured is not None or not self._untried
            await asyncio.sleep(_WATCH_S if replica.measured is not None else _RETRY_S)

    @staticmethod
    async def _is_away(replica: _ReplicaLogprobs) -> bool:
        # One slow answer is no absence.
        return await replica.client.probe() is None and await replica.client.probe() is None

    async def _measure(self, replica: _ReplicaLogprobs) -> None:
        declared, url = replica.backend.logprobs_mode, replica.client.base_url
        try:
            replica.measured, problem = await replica.client.checked_mode(declared)
        except ServerUnavailable as error:
            problem = f"is not measured yet, so nothing of it is trained on: {error}"
        except RequestRefused as error:
            replica.measured = declared
            problem = f"is declared to give {declared.value} log-probs, which cannot be checked: {error}"
        if problem and problem != replica.told:
            log.warning("the backend %s at %s %s", replica.backend.name, url, problem)
        replica.told = problem
