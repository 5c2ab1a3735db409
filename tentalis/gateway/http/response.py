"""A response that is produced while it is sent, and cancelled when its client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class WorkResponse(Response):
    """A response whose status, headers and body are sent by the coroutine function `work`."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response as an ASGI application."""
        task = asyncio.current_task()
        assert task is not None
        finished = False

        def on_disconnect(_: "asyncio.Task[None]") -> None:
            if not finished and not watcher.cancelled():
                task.cancel()

        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(on_disconnect)
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not watcher.done() or watcher.cancelled():
                raise
            task.uncancel()
        finally:
            finished = True
            watcher.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(send: Send, response: Response) -> None:
    """Sends a complete response."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send_piece(send, bytes(response.body), last=True)


async def send_piece(send: Send, piece: bytes, *, last: bool = False) -> None:
    """Sends one piece of a response body."""
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
