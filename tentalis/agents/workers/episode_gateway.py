"""The gateway, as a worker sees it that plays episodes of programs: it is checked before and watched during one."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

log = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Seconds for which a gateway that is away is waited for before a program starts."""
CALL_S = 60.0
"""Seconds for one answer of the check, which waits for the served version."""
WATCH_EVERY_S, WATCH_CALL_S = 1.0, 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class GatewayUnusable(Exception):
    """The gateway is away, or does not accept the key of an episode. The message says what to correct."""


class GatewayWatch:
    """The view of the gateway while a program runs. `away`: the reason why it did not answer at some moment, or
    None."""

    def __init__(self) -> None:
        self.away: str | None = None


class EpisodeGateway:
    """A gateway at `url`, without /v1."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s

    async def check(self, key: str) -> None:
        """Returns once the gateway answers calls of this key. Raises GatewayUnusable."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._patience_s, _FIRST_PAUSE_S
        async with httpx.AsyncClient(timeout=CALL_S) as http:
            while True:
                try:
                    response = await http.get(f"{self.url}/v1/episode", headers={"Authorization": f"Bearer {key}"})
                    reason = f"it answered {response.status_code}: {_message(response)}"
                    if response.status_code == 200:
                        return
                    if response.status_code < 500:
                        raise GatewayUnusable(f"the gateway {self.url} does not answer the episode: {reason}")
                except httpx.HTTPError as error:
                    reason = str(error) or type(error).__name__
                if loop.time() + pause > deadline:
                    raise GatewayUnusable(f"the gateway {self.url} is away: {reason}")
                log.warning("the gateway %s is away, trying again: %s", self.url, reason)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[GatewayWatch]:
        """Asks for the gateway's health every second until the end of the block."""
        watch = GatewayWatch()
        watching = asyncio.create_task(self._watch(watch))
        try:
            yield watch
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, watch: GatewayWatch) -> None:
        async with httpx.AsyncClient(timeout=WATCH_CALL_S) as http:
            while True:
                await asyncio.sleep(WATCH_EVERY_S)
                try:
                    response = await http.get(f"{self.url}/healthz")
                    if response.status_code != 200:
                        watch.away = f"its health was {response.status_code}: {response.text[:500].strip()}"
                except httpx.HTTPError as error:
                    watch.away = str(error) or type(error).__name__


def _message(response: httpx.Response) -> str:
    try:
        return str(json.loads(response.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500].strip()
