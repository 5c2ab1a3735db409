"""An OpenAI-compatible endpoint for tests that answers as its script says: it hangs, fails, lies, breaks off."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """`status`, `body` and further `headers` as they are sent; `hang`: nothing is, until the connection closes; `drop`:
    the connection is closed in the middle of the body."""

    status: int = 200
    body: bytes = b""
    headers: str = ""
    hang: bool = False
    drop: bool = False


HANG = Reply(hang=True)


def says(text: Any, finish_reason: str = "stop") -> Reply:
    """A chat completion with this content."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Reply(body=json.dumps({"object": "chat.completion", "choices": [choice]}).encode())


@dataclass
class JudgeServer:
    """`script` is asked for the reply to each request, by its number and its body. No reply is sent before `together`
    requests have come."""

    script: Callable[[int, dict[str, Any]], Reply]
    url: str = ""
    together: int = 1
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        number = len(self.asked)
        self.asked.append(body)
        self.headers.append(head)
        if len(self.asked) >= self.together:
            self._enough.set()
        await self._enough.wait()
        reply = self.script(number, body)
        if reply.hang:
            await reader.read()
            raise ConnectionResetError
        length = len(reply.body)
        writer.write(f"HTTP/1.1 {reply.status} X\r\nContent-Length: {length}\r\n{reply.headers}\r\n".encode())
        writer.write(reply.body[: length // 2] if reply.drop else reply.body)
        await writer.drain()
        if reply.drop:
            raise ConnectionResetError


@asynccontextmanager
async def judge_server(script: Callable[[int, dict[str, Any]], Reply] | list[Reply]) -> AsyncIterator[JudgeServer]:
    """A running server. With a list, request i gets reply i, and the last one from then on."""
    replies = script

    def listed(number: int, _: dict[str, Any]) -> Reply:
        assert isinstance(replies, list)
        return replies[min(number, len(replies) - 1)]

    server = JudgeServer(listed if isinstance(script, list) else script)
    serving = await asyncio.start_server(server._serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        serving.close()
        await asyncio.gather(*server._serving)


@contextmanager
def judge_in_thread(
    script: Callable[[int, dict[str, Any]], Reply] | list[Reply], together: int = 1
) -> Iterator[JudgeServer]:
    """The same beside a test that has no event loop: its script runs in a thread."""
    started: threading.Event = threading.Event()
    servers: list[JudgeServer] = []

    async def serve() -> None:
        async with judge_server(script) as server:
            server.together = together
            servers.append(server)
            started.set()
            await over.wait()
            for task in server._serving:
                task.cancel()

    loop, over = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
