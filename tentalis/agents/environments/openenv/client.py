"""The client of one session of an OpenEnv server: JSON messages over its WebSocket `/ws`, and its schema over HTTP.

A session begins with the connection and ends with it. The server answers each message with one of its own: an
observation, a result of MCP, or an error with a code.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.rewards.environment_file import EnvironmentServer
from tentalis.text.tool_output import head_and_tail, readable_text

log = logging.getLogger(__name__)

CONNECT_S, SCHEMA_S, CLOSE_S = 30.0, 30.0, 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_MOST_BYTES = 32 << 20
"""Longest message of a server."""
_REASON_CHARACTERS = 500
_FULL, _INVALID, _RAISED = "CAPACITY_REACHED", "VALIDATION_ERROR", "EXECUTION_ERROR"


class OpenEnvFault(EnvironmentFault):
    """A server is away, has ended the session, failed, or answers in another way than the protocol says."""


class OpenEnvFull(OpenEnvFault):
    """A server has no free session."""


class StepFailed(OpenEnvFault):
    """The environment raised an exception, with the text `said`. The session continues."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class InvalidAction(Exception):
    """The server refuses an action that is not of its schema. The message, also `said`, has the reason."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


class OpenEnvClient:
    """One session, from `begin` to `close`. All calls but `close` raise OpenEnvFault. Messages are sent once: only the
    server knows if one took effect."""

    def __init__(self, server: EnvironmentServer, key: str | None) -> None:
        self._server = server
        self._url = server.url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._connection: ClientConnection | None = None

    async def action_schema(self) -> Mapping[str, Any]:
        """Returns the JSON schema of the server's actions."""
        url = f"{self._url}/schema"
        try:
            async with httpx.AsyncClient(headers=self._headers, timeout=SCHEMA_S) as http:
                response = await http.get(url)
            found = json.loads(response.content)["action"] if response.status_code == 200 else None
        except httpx.HTTPError as error:
            raise OpenEnvFault(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OpenEnvFault(f"{url} answered without the schema of an action: is it a server of OpenEnv?") from error
        if not isinstance(found, dict):
            raise OpenEnvFault(f"{url} answered {response.status_code} without the schema of an action")
        return found

    async def begin(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begins a session and resets its environment. Waits for a free session up to `wait_s`. Returns the first
        observation."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._server.wait_s, _FIRST_WAIT_S
        while True:
            await self._connect()
            try:
                return await self._ask("reset", data, "observation", self._server.reset_s)
            except InvalidAction as error:
                raise OpenEnvFault(f"{self._url} refuses the data of `reset`: {error}") from error
            except OpenEnvFull as full:
                await self.close()
                if loop.time() + pause > deadline:
                    raise OpenEnvFault(f"no free session within {self._server.wait_s:g} s: {full}") from full
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes an action. Returns the observation. Raises InvalidAction, and StepFailed if the environment raised an
        exception."""
        return await self._ask("step", action, "observation", self._server.exec_s)

    async def tools(self) -> list[Any]:
        """Returns the tools of an environment of MCP, as the server lists them."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        try:
            answer = await self._ask("mcp", request, "mcp", self._server.exec_s)
        except InvalidAction as error:
            raise OpenEnvFault(f"{self._url} lists no tools: {error}") from error
        result = answer.get("result")
        found = result.get("tools") if isinstance(result, dict) else None
        if not isinstance(found, list):
            raise OpenEnvFault(f"{self._url} lists no tools: {_shown(answer.get('error') or answer)}")
        return found

    async def close(self) -> None:
        """Ends the session."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await connection.send(json.dumps({"type": "close"}))
                await connection.close()
        except (TimeoutError, OSError, WebSocketException) as error:
            log.debug("the session on %s was already over: %s", self._url, error)

    async def _connect(self) -> None:
        url = f"ws{self._url.removeprefix('http')}/ws"
        try:
            # A server that computes does not answer pings: they keep proxies from closing, and decide nothing.
            self._connection = await connect(
                url,
                additional_headers=self._headers,
                open_timeout=CONNECT_S,
                ping_timeout=None,
                max_size=_MOST_BYTES,
                proxy=None,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise OpenEnvFault(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any], answered: str, limit_s: float) -> Mapping[str, Any]:
        """Returns the data of the answer to a message, which must be of a type. Raises InvalidAction."""
        connection = self._connection
        assert connection is not None, "a message before `begin`"
        try:
            async with asyncio.timeout(limit_s):
                raw = await _exchanged(connection, json.dumps({"type": kind, "data": dict(data)}))
        except TimeoutError as error:
            raise OpenEnvFault(f"{self._url} did not answer `{kind}` within {limit_s:g} s") from error
        except (ConnectionClosed, OSError) as error:
            raise OpenEnvFault(f"{self._url} ended the session at `{kind}`: {error}") from error
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(found, dict):
            raise OpenEnvFault(f"{self._url} answered `{kind}` without data: {_shown(raw)}")
        if answer.get("type") == "error":
            raise self._refusal(kind, found)
        if answer.get("type") != answered:
            raise OpenEnvFault(f"{self._url} answered `{kind}` with `{_shown(answer.get('type'))}`")
        return found

    def _refusal(self, kind: str, error: Mapping[str, Any]) -> Exception:
        said = _shown(error.get("message") or "no reason")
        if error.get("code") == _FULL:
            return OpenEnvFull(f"{self._url}: {said}")
        if error.get("code") == _INVALID:
            return InvalidAction(_shown(_problems(error.get("errors"))) or said)
        message = f"{self._url} failed at `{kind}` ({_shown(error.get('code'))}): {said}"
        return StepFailed(message, said) if error.get("code") == _RAISED else OpenEnvFault(message)


async def _exchanged(connection: ClientConnection, text: str) -> str | bytes:
    """Sends a message and returns the answer. Raises ConnectionClosed."""
    try:
        await connection.send(text)
    except ConnectionClosed:
        # A server without a free session says so and closes, without waiting for a message.
        return await connection.recv()
    return await connection.recv()


def _problems(errors: object) -> str:
    """Returns pydantic's errors in words."""
    listed = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in listed)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return head_and_tail(readable_text(text.encode("utf-8", errors="replace")).strip(), _REASON_CHARACTERS)
