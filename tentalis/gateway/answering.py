"""An answer as an ASGI application: made while it is sent, and given up when its client goes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)


class Answer(Response):
    """What `work` sends. `stall_s`: how long the client may take for a piece."""

    def __init__(self, work: Callable[[Send], Awaitable[None]], stall_s: float) -> None:
        super().__init__()
        self._work, self._stall_s = work, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as an ASGI application."""

        async def patient(event: Event) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(event)
            except TimeoutError as error:
                raise _Gone from error

        task = asyncio.current_task()
        assert task is not None
        over = False

        def hung_up(_: "asyncio.Task[None]") -> None:
            if not over and not watcher.cancelled():
                task.cancel()

        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(hung_up)
        try:
            await self._work(patient)
        except _Gone:
            log.info("a client took nothing for %g s: its answer is given up", self._stall_s)
        except asyncio.CancelledError:
            if not watcher.done() or watcher.cancelled():
                raise
            task.uncancel()
        finally:
            over = True
            watcher.cancel()


class _Gone(OSError):
    """The client does not take what it is sent."""


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
