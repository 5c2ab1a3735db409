"""The HTTP client of one lease of an environment pool: the contract of OpenClaw-RL's terminal pool, with its additions
of `tentalis serve env-pool` where a server has them (docs/reference/env-pool.md)."""

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from typing import Any

import httpx

from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.rewards.environment_file import EnvironmentServer
from tentalis.text.tool_output import head_and_tail, readable_text

log = logging.getLogger(__name__)

CONNECT_S, ALLOCATE_S, HEARTBEAT_CALL_S, CLOSE_S = 10.0, 30.0, 10.0, 60.0
"""Time limits of connecting, and of calls whose limit is not a setting."""
ALLOCATE_TRIES = 3
"""Tries of an allocation that the server did not answer. It is idempotent, so no place is taken twice."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_REASON_CHARACTERS = 500
_AWAY = frozenset({502, 503, 504})
"""Statuses of a proxy before a pool that does not answer."""


class PoolFault(EnvironmentFault):
    """A pool is away, refuses a call, or answers in another way than the contract says."""


class PoolAway(PoolFault):
    """A pool cannot be reached or does not answer in time."""


class PoolRefusal(PoolFault):
    """A pool refuses a call, such as one of a lease that it does not know. `status`: the HTTP status. `retry_after_s`:
    the pause that the pool asks for, or None."""

    def __init__(self, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class PoolClient:
    """One lease, from `allocate` to `close`. Between them it sends heartbeats.

    All calls but `close` raise PoolFault. Calls that act are sent once: only the pool knows if one took effect.
    """

    def __init__(self, server: EnvironmentServer, key: str | None) -> None:
        self._server = server
        self._url = server.url.rstrip("/")
        headers = {} if key is None else {b"authorization": f"Bearer {key}".encode()}
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S))
        self._lease: dict[str, Any] = {}
        self._heartbeats: asyncio.Task[None] | None = None
        self._lost: str | None = None

    async def allocate(self, task_key: str, request_id: str) -> None:
        """Takes a place, and waits for one up to `wait_s`. The same `request_id` gets the same lease."""
        body = {"task_key": task_key, "request_id": request_id}
        loop = asyncio.get_running_loop()
        deadline, pause, tries = loop.time() + self._server.wait_s, _FIRST_WAIT_S, 0
        while True:
            try:
                answer = await self._post("allocate", body, ALLOCATE_S)
                break
            except PoolRefusal as refusal:
                if refusal.status != 429:
                    raise
                wanted = (refusal.retry_after_s or pause) * random.uniform(1.0, 1.25)
                if loop.time() + wanted > deadline:
                    raise PoolFault(f"no free place within {self._server.wait_s:g} s: {refusal}") from refusal
            except PoolAway:
                tries += 1
                if tries == ALLOCATE_TRIES:
                    raise
                wanted = pause
            await asyncio.sleep(wanted)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        lease_id = answer.get("lease_id")
        if not isinstance(lease_id, str) or not lease_id:
            raise PoolFault(f"{self._url}/allocate answered without a lease_id")
        self._lease = {"lease_id": lease_id}
        if "holder" in answer:
            self._lease["holder"] = answer["holder"]
        expires_s = answer.get("lease_s")
        every_s = self._server.heartbeat_s
        if isinstance(expires_s, int | float) and not isinstance(expires_s, bool) and expires_s > 0:
            every_s = expires_s / 3
        self._heartbeats = asyncio.create_task(self._beat(every_s), name="env-pool-heartbeats")

    async def reset(self, task_meta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begins an episode. Returns the answer, with `user_msg` and `tool_schemas`."""
        return await self._call("reset", {"task_meta": task_meta, "run_ctx": {}}, self._server.reset_s)

    async def exec_tool(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carries a call out. Returns the answer, with `observation`."""
        body = {"tool_call": {"name": name, "arguments": arguments}}
        return await self._call("exec_tool", body, self._server.exec_s)

    async def evaluate(self, answer: str | None, limit_s: float) -> Mapping[str, Any]:
        """Scores the episode, whose answer is the text of the last turn, None without one. Returns the answer, with
        `score`."""
        return await self._call("evaluate", {"answer": answer}, limit_s)

    async def close(self) -> None:
        """Ends heartbeats, lease and connections. A pool that does not answer is logged: the lease expires there."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        try:
            if self._lease:
                await self._post("close", self._lease, CLOSE_S)
        except PoolFault as error:
            log.warning("the lease %s was not closed, and expires in the pool: %s", self._lease["lease_id"], error)
        finally:
            self._lease = {}
            await self._http.aclose()

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._post("heartbeat", self._lease, HEARTBEAT_CALL_S)
            except PoolRefusal as refusal:
                if refusal.status not in _AWAY:
                    self._lost = str(refusal)
                    return
                log.warning("a heartbeat was not answered: %s", refusal)
            except PoolFault as error:
                log.warning("a heartbeat was not answered: %s", error)

    async def _call(self, path: str, body: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        if self._lost is not None:
            raise PoolFault(f"the lease is lost: {self._lost}")
        return await self._post(path, {**self._lease, **body}, limit_s)

    async def _post(self, path: str, body: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        """Returns the JSON object that a path answers. Raises PoolFault."""
        url = f"{self._url}/{path}"
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.post(url, json=dict(body))
        except TimeoutError as error:
            raise PoolAway(f"{url} did not answer within {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise PoolAway(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
        try:
            answer = json.loads(response.content)
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict) and answer.get("ok") is True:
            return answer
        if (isinstance(answer, dict) and answer.get("ok") is False) or not response.is_success:
            reason = answer.get("error") if isinstance(answer, dict) else response.text
            said = head_and_tail(readable_text(str(reason or "").encode(errors="replace")).strip(), _REASON_CHARACTERS)
            message = f"{url} answered {response.status_code}: {said or 'no reason'}"
            raise PoolRefusal(message, response.status_code, _retry_after_s(response))
        raise PoolFault(f"{url} answered without `ok`: is this the address of a pool of environments?")


def _retry_after_s(response: httpx.Response) -> float | None:
    """Returns the seconds of a Retry-After header; None without one, or if it names a time of day."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
