"""The transport of MCP over the pipes of a running command: one JSON-RPC message per line, each of bounded length.

The SDK's own transport starts a process itself, so that it could not be behind a wall, and reads lines of any length.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import IO

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, JSONRPCRequest, RequestId, jsonrpc_message_adapter

from tentalis.agents.sandbox import RunningCommand

MESSAGE_BYTES = 1024 * 1024
"""Length of a message of a server that is read. A longer one is dropped, and its request is answered with an error."""
TOO_LONG = -32090
"""Error code of a request whose answer was dropped."""
STDERR_BYTES = 4096
_CHUNK = 64 * 1024

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class BoundedLines:
    """Splits bytes into lines. A line over `limit` bytes is dropped, and None stands for it. Pure."""

    def __init__(self, limit: int = MESSAGE_BYTES) -> None:
        self._limit, self._kept, self._size, self._dropping = limit, list[bytes](), 0, False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Yields the lines that end in a chunk.

        >>> lines = BoundedLines(5)
        >>> [list(lines.feed(chunk)) for chunk in (b"on", b"e\\ntwo\\nlong", b"er\\nfour\\n")]
        [[], [b'one', b'two'], [None, b'four']]
        """
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield None if self._dropping else b"".join(self._kept)
            self._kept, self._size, self._dropping = [], 0, False
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            self._kept, self._dropping = [], True
        elif part:
            self._kept.append(part)


class PipeTransport:
    """The transport of one server; `stderr` has the last bytes that the server wrote there."""

    def __init__(self, command: RunningCommand) -> None:
        self._command = command
        self._asked: RequestId | None = None
        self.stderr = b""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Streams]:
        """Yields the streams of messages. At its end, the command is closed and everything that it started is gone."""
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(to_session)),
            asyncio.create_task(self._write(from_session)),
            asyncio.create_task(self._read_stderr()),
        ]
        try:
            yield from_server, to_server
        finally:
            await asyncio.to_thread(self._command.close)  # a write that blocks ends with it
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()

    async def _read(self, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Passes the server's messages on. The end of its output is the end of the session."""
        lines = BoundedLines()
        async with to_session, _reading(self._command.stdout) as reader:
            while chunk := await reader.read(_CHUNK):
                for line in lines.feed(chunk):
                    try:
                        await to_session.send(self._message(line))
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return  # the session has ended

    def _message(self, line: bytes | None) -> SessionMessage | Exception:
        if line is not None:
            try:
                return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                return error
        if self._asked is None:
            return ValueError(f"a message of over {MESSAGE_BYTES} bytes that nothing asked for")
        dropped = ErrorData(code=TOO_LONG, message=f"the answer is longer than {MESSAGE_BYTES} bytes")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=self._asked, error=dropped))

    async def _write(self, from_session: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with from_session:
            async for sent in from_session:
                if isinstance(sent.message, JSONRPCRequest):
                    self._asked = sent.message.id
                line = sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                try:
                    await asyncio.to_thread(_write_all, self._command.stdin, line)
                except (OSError, ValueError):
                    return  # the server has closed its input; its output ends too, or a call reaches its time limit

    async def _read_stderr(self) -> None:
        async with _reading(self._command.stderr) as reader:
            while chunk := await reader.read(_CHUNK):
                self.stderr = (self.stderr + chunk)[-STDERR_BYTES:]


@asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]
