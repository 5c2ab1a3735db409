"""A stream as it passes: chunk by chunk as they come, and its end when the turn is written down."""

from collections.abc import Awaitable, Callable

import httpx
from starlette.types import Send

from tentalis.gateway.answering import send_piece
from tentalis.gateway.asking import not_trainable_as_asked
from tentalis.gateway.calls import Call
from tentalis.gateway.capture import Capture, strip
from tentalis.gateway.exchange import Broken, Chunks

# What it raises to read an answer that is JSON, but not what the API says.
MISSHAPEN = (AttributeError, TypeError, KeyError, ValueError, IndexError, RecursionError)


class Streaming:
    """The stream of one call. `capture`: what has passed; `begun`: the client has the head of the answer."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call, self._send = call, send
        self._shape = call.shape.stream(call.event_id)
        self.capture = Capture(call.ask.n)
        self.begun = False

    async def passes(self, response: httpx.Response, keep: Callable[[], Awaitable[None]]) -> None:
        """Sends it all; `keep` returns when the turn is written down. Raises Broken, TooLong, httpx.HTTPError, and what
        `keep` raises: then the answer is to be ended by `breaks_off`, or by another answer where it has not begun."""
        held: list[bytes] = []
        chunks = Chunks(response)
        async for chunk in chunks:
            self.capture.take(chunk)
            strip(chunk, self._call.ask.wants)
            try:
                piece = self._shape.chunk(chunk)
            except MISSHAPEN as error:
                raise Broken("the backend's stream holds what is no part of a completion") from error
            # Clients take a finish reason for the end: from there on nothing goes out before all is written down.
            if self.capture.finished or held:
                held.append(piece)
            elif piece:
                await self._piece(piece)
        if not (self.capture.finished or (chunks.done and self.capture.as_it_came)):
            raise Broken("the backend's stream ended before its end")
        await keep()
        await self._piece(b"".join([*held, self._shape.end()]), last=True)

    async def breaks_off(self, message: str) -> None:
        """Ends it with an error."""
        await self._piece(self._shape.error(502, "server_error", message), last=True)

    async def _piece(self, piece: bytes, *, last: bool = False) -> None:
        if not self.begun:
            # Not before the first piece, which tells whether the backend gives tokens.
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._head()})
        await send_piece(self._send, piece, last=last)

    def _head(self) -> list[tuple[bytes, bytes]]:
        call = self._call
        reason = not_trainable_as_asked(call.ask.body, call.route, tokens=call.tokens, n=call.ask.n)
        headers = call.answered(trainable=not reason and self.capture.prompt_token_ids is not None)
        headers |= {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
