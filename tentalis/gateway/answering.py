"""An answer as an ASGI application: made while it is sent, and given up when its client goes."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Answer(Response):
    """What `work` sends."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as an ASGI application."""
        task = asyncio.current_task()
        assert task is not None
        over = False

        def hung_up(_: "asyncio.Task[None]") -> None:
            if not over and not watcher.cancelled():
                task.cancel()

        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(hung_up)
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not watcher.done() or watcher.cancelled():
                raise
            task.uncancel()
        finally:
            over = True
            watcher.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_whole(send: Send, response: Response) -> None:
    """Sends an answer that is all there."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send_piece(send, bytes(response.body), last=True)


async def send_piece(send: Send, piece: bytes, *, last: bool = False) -> None:
    """Sends a piece of a body."""
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
