"""Passes a stream on: each chunk as it arrives, and the end once the turn is recorded."""

from collections.abc import Awaitable, Callable

import httpx
from starlette.types import Send

from tentalis.gateway.calls.backend_call import BrokenStream, ChunkStream
from tentalis.gateway.calls.call import GatewayCall
from tentalis.gateway.calls.capture import AnswerCapture, strip_unrequested
from tentalis.gateway.http.response import send_piece

# Exceptions raised by reading an answer that is JSON but does not follow the API.
MALFORMED_ANSWER = (AttributeError, TypeError, KeyError, ValueError, IndexError, RecursionError)


class StreamRelay:
    """The stream of one call. `capture`: the answer so far; `started`: the response head has been sent."""

    def __init__(self, call: GatewayCall, send: Send) -> None:
        self._call, self._send = call, send
        self._stream_format = call.protocol.stream(call.event_id, call.body)
        self.capture = AnswerCapture(call.backend_request.n)
        self.started = False

    async def relay(self, response: httpx.Response, record_turn: Callable[[], Awaitable[None]]) -> None:
        """Sends the whole stream; `record_turn` returns once the turn is recorded.

        Raises BrokenStream, EventTooLong, httpx.HTTPError, and the exceptions of `record_turn`. The caller then ends
        the stream with `send_error`, or sends another answer if the stream has not begun.
        """
        held: list[bytes] = []
        chunks = ChunkStream(response)
        async for chunk in chunks:
            self.capture.add(chunk)
            strip_unrequested(chunk, self._call.backend_request.requested)
            try:
                encoded = self._stream_format.chunk(chunk)
            except MALFORMED_ANSWER as error:
                raise BrokenStream("the backend's stream holds a chunk that is not part of a completion") from error
            # Clients take a finish reason for the end: from there on, nothing is sent before the turn is recorded.
            if self.capture.finished or held:
                held.append(encoded)
            elif encoded:
                await self._send_piece(encoded)
        if not (self.capture.finished or (chunks.done and self.capture.received_choices_finished)):
            raise BrokenStream("the backend's stream ended too early")
        await record_turn()
        await self._send_piece(b"".join([*held, self._stream_format.end()]), last=True)

    async def send_error(self, message: str) -> None:
        """Ends the stream with an error."""
        await self._send_piece(self._stream_format.error(502, "server_error", message), last=True)

    async def _send_piece(self, piece: bytes, *, last: bool = False) -> None:
        if not self.started:
            # Not before the first piece, which shows whether the backend gives tokens.
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._response_headers()})
        await send_piece(self._send, piece, last=last)

    def _response_headers(self) -> list[tuple[bytes, bytes]]:
        call = self._call
        reason = call.untrainable_request_reason()
        headers = call.success_headers(trainable=not reason and self.capture.prompt_token_ids is not None)
        headers |= {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
