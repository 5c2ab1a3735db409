"""The probes of replicas: their health, and the models that they list."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import httpx

from tentalis.inference.replicas.breaker import BreakerState
from tentalis.inference.replicas.router import ReplicaRouter

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0


async def listed_models(http: httpx.AsyncClient) -> list[str] | None:
    """Returns the names of the models of a replica; none for a server that lists none; None if it is not healthy.

    A server without `/health` is healthy if it answers. `http`: a client whose base URL is the replica's.
    """
    try:
        health = await http.get("/health", timeout=PROBE_TIMEOUT_S)
        if health.status_code >= 500:
            return None
        cards = await http.get("/v1/models", timeout=PROBE_TIMEOUT_S)
        if cards.status_code >= 500:
            return None
        if cards.is_error:
            return []
        return [str(card["id"]) for card in cards.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def log_change(url: str, state: BreakerState) -> None:
    """Logs that the breaker of a replica changed."""
    if state is BreakerState.OPEN:
        log.warning("the replica %s is not asked for now: its last calls or probes failed", url)
    else:
        log.info("the replica %s is asked again (%s)", url, state.value)


class ReplicaProbes:
    """The probes of a router's replicas, which run while there are calls. `probe`: the models that the replica at a URL
    lists, None if it is not healthy; raises nothing."""

    def __init__(self, router: ReplicaRouter, probe: Callable[[str], Awaitable[list[str] | None]]) -> None:
        self._router, self._probe = router, probe
        self._running: dict[str, asyncio.Task[None]] = {}

    async def before_call(self, model: str | None) -> None:
        """Begins the probes that are due. Waits for them only if no replica has listed the version `model`."""
        for url in self._router.due_probes(model):
            if url not in self._running or self._running[url].done():
                self._running[url] = asyncio.create_task(self._probe_replica(url))
        while self._router.lacks(model):
            running = [probe for probe in self._running.values() if not probe.done()]
            if not running:
                return
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Ends the probes."""
        for probe in self._running.values():
            probe.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _probe_replica(self, url: str) -> None:
        self._router.probed(url, await self._probe(url))
