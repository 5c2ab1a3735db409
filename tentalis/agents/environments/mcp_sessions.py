"""Sessions with MCP servers, for the length of an episode: opens them, lists their tools, calls them, closes them.

A server that cannot be reached or dies is an EnvironmentFault. A tool's error is its output, which the policy sees.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import REQUEST_TIMEOUT, CallToolResult
from pydantic import ValidationError

from tentalis.agents.environments.mcp_pipes import PipeTransport
from tentalis.agents.environments.mcp_results import BadServerTool, ServerTool, readable, result_bytes, server_tool
from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.agents.environments.tools import McpServer
from tentalis.agents.sandbox import RunningCommand

START_S = 60.0
"""Seconds in which a server must have started and listed its tools."""
CLOSE_S = 10.0
MOST_TOOLS = 256
_CONNECT_S = 30.0

Start = Callable[[McpServer], RunningCommand]
"""Starts the command of a server. Raises SandboxFault; may block."""


class McpSession:
    """The session with one server. A separate task holds it, so that its end never cancels the caller's task."""

    def __init__(self, server: McpServer, start: Start) -> None:
        self._server, self._start = server, start
        self._closing = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Client] | None = None
        self._pipes: PipeTransport | None = None
        self.tools: tuple[ServerTool, ...] = ()

    async def open(self) -> None:
        """Starts or reaches the server and lists its tools. Raises EnvironmentFault. Call `close` afterwards."""
        self._opened = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(self._opened))
        try:
            async with asyncio.timeout(START_S):
                self.tools = await self._listed(await asyncio.shield(self._opened))
        except TimeoutError as error:
            raise self._fault(f"has not listed its tools in {START_S:g} s") from error
        except (MCPError, ValidationError, BadServerTool) as error:
            raise self._fault(f"does not list its tools: {error}") from error

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        try:
            async with Client(self._transport(), read_timeout_seconds=START_S) as client:
                opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - the SDK raises groups of what its transports raise
            if not opened.done():
                opened.set_exception(self._fault(f"cannot be reached: {_reason(error)}"))
                opened.exception()  # seen, also if nobody waits for it any more

    def _transport(self) -> Any:
        return self._reached() if self._server.url is not None else self._started()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[Any]:
        self._pipes = PipeTransport(await asyncio.to_thread(self._start, self._server))
        async with self._pipes.connected() as streams:
            yield streams

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[Any]:
        assert self._server.url is not None
        headers = {}
        if self._server.token_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self._server.token_variable, '')}"
        timeout = httpx2.Timeout(_CONNECT_S, read=self._server.timeout_s + _CONNECT_S)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            streamable_http_client(self._server.url, http_client=http) as streams,
        ):
            yield streams

    async def _listed(self, client: Client) -> tuple[ServerTool, ...]:
        found: list[ServerTool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            wanted = self._server.tools
            found += [server_tool(tool) for tool in page.tools if wanted is None or tool.name in wanted]
            if len(found) > MOST_TOOLS:
                raise self._fault(f"has more than {MOST_TOOLS} tools: list the ones to offer in `tools`")
            cursor = page.next_cursor
            if not cursor:
                break
        absent = sorted(set(self._server.tools or ()) - {tool.name for tool in found})
        if absent:
            raise self._fault(f"has no tool {', '.join(absent)}, which `tools` names")
        return tuple(found)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        """Returns the output of a tool. Raises EnvironmentFault if the server has gone."""
        assert self._opened is not None, "call before open"
        client = self._opened.result()
        try:
            result = await client.call_tool(name, dict(arguments), read_timeout_seconds=self._server.timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return b"[stopped: the time limit was reached]"
            await self._check_alive(client, name)
            return f"error: {error.message}".encode("utf-8", errors="replace")
        except (ValidationError, RuntimeError) as error:
            # The SDK checks the result against the tool's schema; input of a person is asked for by RuntimeError too.
            return f"error: the tool's result cannot be used: {error}".encode("utf-8", errors="replace")
        assert isinstance(result, CallToolResult)
        return result_bytes(result)

    async def _check_alive(self, client: Client, called: str) -> None:
        """Raises EnvironmentFault if the server no longer lists its tools.

        The code of an error does not tell: the SDK answers with codes that servers use too if a connection is closed, a
        session has ended or a proxy has an error.
        """
        try:
            await client.list_tools(cache_mode="refresh")
        except MCPError as error:
            raise self._fault(f"has gone during a call of {called!r}: {error.message}") from error

    async def close(self) -> None:
        """Ends the session; a server that was started is gone afterwards."""
        self._closing.set()
        if self._holder is None:
            return
        if self._opened is None or not self._opened.done():
            self._holder.cancel()
        await asyncio.wait({self._holder}, timeout=CLOSE_S)
        if not self._holder.done():
            self._holder.cancel()
            await asyncio.wait({self._holder})

    def _fault(self, problem: str) -> EnvironmentFault:
        said = readable(self._pipes.stderr.decode("utf-8", errors="replace")).strip() if self._pipes else ""
        return EnvironmentFault(
            f"the MCP server {self._server.name!r} of the file of tools {problem}"
            + (f"; its error output ends with: {said[-1000:]}" if said else "")
        )


class McpSessions:
    """The sessions of one episode, and the tools of all their servers by name."""

    def __init__(self, servers: Sequence[McpServer], start: Start) -> None:
        self._sessions = [McpSession(server, start) for server in servers]
        self.tools: dict[str, ServerTool] = {}
        self._of: dict[str, McpSession] = {}

    async def open(self, taken: Sequence[str]) -> None:
        """Opens all sessions. `taken`: names of other tools. Raises EnvironmentFault. Call `close` afterwards."""
        opened = await asyncio.gather(*(session.open() for session in self._sessions), return_exceptions=True)
        for outcome in opened:
            if outcome is not None:
                raise outcome
        for session in self._sessions:
            for tool in session.tools:
                if tool.name in self.tools or tool.name in taken:
                    raise EnvironmentFault(
                        f"several tools are named {tool.name!r}: leave it out of the `tools` of an MCP server"
                    )
                self.tools[tool.name] = tool
                self._of[tool.name] = session

    async def call(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        """See McpSession.call."""
        return await self._of[name].call(name, arguments)

    async def close(self) -> None:
        """Closes all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions))


def _reason(error: BaseException) -> str:
    """Returns the text of an error; of a group, that of its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
