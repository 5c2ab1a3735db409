"""A connection to a browser by the Chrome DevTools Protocol: JSON messages that end in a zero byte, over its pipes.

The browser is a command behind the wall; it listens on no port. Begin reading with `DevTools.call`.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import IO, Any

from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.agents.sandbox import RunningCommand

MESSAGE_BYTES = 64 * 1024 * 1024
"""Bytes of a message of the browser that are read. A longer one ends the connection."""
STDERR_BYTES = 4096
STDERR_S = 1.0
"""Seconds in which the error output of a browser that has ended must end too."""
_CHUNK = 64 * 1024

EventHandler = Callable[[str, Mapping[str, Any], str | None], Coroutine[Any, Any, None] | None]
"""Gets the method, the parameters and the session of each event. A coroutine that it returns is run beside."""


class BrowserGone(EnvironmentFault):
    """The browser has ended, or its connection has. The message has the end of its error output."""


class DevToolsError(Exception):
    """The browser refused a command; the message is the browser's."""


class PageCrashed(Exception):
    """The page of a session crashed, and answers nothing any more."""


class DevTools:
    """The connection to one browser. `begin` before the first call, `close` at the end; both in one event loop."""

    def __init__(self, command: RunningCommand) -> None:
        self._command = command
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], str | None]] = {}
        self._writing = threading.Lock()
        self._handlers: list[EventHandler] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._lost: Exception | None = None
        self._stderr = b""

    def begin(self, handler: EventHandler) -> None:
        """Begins to read what the browser writes. `handler` gets its events."""
        self._handlers.append(handler)
        self._readers = [asyncio.create_task(self._read()), asyncio.create_task(self._read_stderr())]

    async def call(
        self, method: str, parameters: Mapping[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Returns the result of a command. Raises BrowserGone, DevToolsError or PageCrashed."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": dict(parameters or {})}
        if session is not None:
            message["sessionId"] = session
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, session
        try:
            await asyncio.to_thread(self._write, json.dumps(message).encode() + b"\0")
            return await future
        except (OSError, ValueError):  # its pipe is closed: `_read` finds the reason
            return await future
        finally:
            self._waiting.pop(number, None)

    def crashed(self, session: str) -> None:
        """Fails the calls of a session whose page crashed."""
        for future, of in self._waiting.values():
            if of == session and not future.done():
                future.set_exception(PageCrashed("the page crashed"))

    async def close(self) -> None:
        """Kills the browser and everything that it started."""
        await asyncio.to_thread(self._command.close)  # a write that blocks ends with it
        running = [*self._readers, *self._tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _write(self, message: bytes) -> None:
        with self._writing:
            _write_all(self._command.stdin, message)

    async def _read(self) -> None:
        reader, transport = await _reader(self._command.stdout, MESSAGE_BYTES)
        try:
            while True:
                self._take(json.loads((await reader.readuntil(b"\0"))[:-1]))
        except asyncio.IncompleteReadError:
            await asyncio.wait(self._readers[1:], timeout=STDERR_S)  # its error output has the reason
            self._fail(self._gone("it has ended"))
        except asyncio.LimitOverrunError:
            self._fail(self._gone(f"it wrote a message of over {MESSAGE_BYTES} bytes"))
        except Exception as error:  # noqa: BLE001 - raised by the next call, and by those that wait
            self._fail(error)
        finally:
            transport.close()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            future, _ = self._waiting.get(message["id"], (None, None))
            if future is None or future.done():  # nobody waits any more
                return
            if "error" in message:
                future.set_exception(DevToolsError(str(message["error"].get("message"))))
            else:
                future.set_result(message["result"])
            return
        for handler in self._handlers:
            work = handler(message["method"], message["params"], message.get("sessionId"))
            if work is not None:
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else BrowserGone(repr(error)))

    def _fail(self, error: Exception) -> None:
        """Fails all calls, also later ones: the connection cannot be used any more."""
        self._lost = self._lost or error
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(self._lost)

    def _gone(self, reason: str) -> BrowserGone:
        said = self._stderr.decode("utf-8", errors="replace").strip()[-1000:]
        ended = f"; its error output ends with: {said}" if said else ""
        return BrowserGone(f"the browser cannot be used: {reason}{ended}")

    async def _read_stderr(self) -> None:
        reader, transport = await _reader(self._command.stderr, _CHUNK)
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                self._stderr = (self._stderr + chunk)[-STDERR_BYTES:]
        transport.close()


async def _reader(pipe: IO[bytes], limit: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader(limit)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]
