"""Asks a call's backend until it answers well, or not at all."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response

from tentalis.gateway.asking import refuses_tokens
from tentalis.gateway.backends import Backends
from tentalis.gateway.calls import ADAPTER_S, RETRY_AFTER_S, Call, Calls
from tentalis.gateway.failure import Refused
from tentalis.gateway.measures import Measures
from tentalis.gateway.settings import Swap, Tokens
from tentalis.gateway.shapes import Shape
from tentalis.gateway.sse import Events

_LONGEST_PAUSE_S = 2.0
# Of the backend's headers, those that are for the client.
_RELAYED = ("retry-after", "content-type")
_LONGEST_ANSWER = 256 * 2**20
# The end of a stream follows its [DONE] at once; where it does not, no client waits for it longer.
_READ_OUT_S = 0.1


class Relayed(Refused):
    """A backend's error, for the client as it came."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(status, f"the backend answered {status}")
        self.body, self.relayed = body, headers

    def response(self, shape: Shape, headers: Mapping[str, str]) -> Response:
        """In OpenAI's shape the body as it came; another shape has the message."""
        if shape.native_errors:
            return Response(self.body, self.status, {**headers, **self.relayed})
        said = {name: value for name, value in self.relayed.items() if name != "content-type"}
        body = shape.error(self.status, "api_error", message_of(self.body))
        return JSONResponse(body, status_code=self.status, headers={**headers, **said})


class Broken(Exception):
    """The backend's stream is not what it should be."""


class Exchange:
    """Asks backends. `hold_s`: how long one may take to swap its weights."""

    def __init__(self, backends: Backends, calls: Calls, measures: Measures, hold_s: float) -> None:
        self._backends, self._calls, self._measures, self._hold_s = backends, calls, measures, hold_s

    async def ask(self, call: Call) -> httpx.Response:
        """The backend's good answer, not yet read. Raises Refused, Relayed for one that is not."""
        pause, deadline = 0.1, None
        while True:
            backend = self._backends[call.route.backend.name]
            response = await backend.post(call.shape.path, call.ask.body, {"x-request-id": call.event_id})
            if response.status_code == 200:
                if call.refused_tokens:
                    backend.gives_no_tokens(call.refused_tokens)
                return response
            try:
                body = backend.redacted(await read(response))
            finally:
                await response.aclose()
            text = body.decode("utf-8", "replace")
            auto = call.route.backend.token_ids is Tokens.AUTO
            if call.tokens and auto and refuses_tokens(response.status_code, text):
                # Perhaps for what the client asked: that was the reason only if the same call goes well without.
                call.refused_tokens = text
                self._calls.aim(call)
                continue
            if response.status_code < 400:
                raise Refused(
                    502, f"the backend {backend.settings.name} answered {response.status_code}", "server_error"
                )
            patience = self._patience(call, response.status_code)
            if patience is None:
                headers = {name: response.headers[name] for name in _RELAYED if name in response.headers}
                raise Relayed(response.status_code, body, headers)
            now = time.monotonic()
            deadline = deadline or now + patience
            if now >= deadline:
                why = "takes new weights" if response.status_code == 503 else f"has no {call.route.model} now"
                raise Refused(
                    503,
                    f"the backend {backend.settings.name} {why}; try again",
                    "server_error",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._measures.holds.inc()
            await asyncio.sleep(min(pause, deadline - now))
            pause = min(_LONGEST_PAUSE_S, 2 * pause)
            self._calls.rerouted(call)

    def _patience(self, call: Call, status: int) -> float | None:
        """For how long a refusal is waited out; None if it is the answer."""
        if status == 503 and call.route.backend.swap is Swap.HOLD:
            return self._hold_s
        if status == 404 and call.route.policy and not call.route.pinned and not call.route.unserved:
            return min(ADAPTER_S, self._hold_s)
        return None


async def read(response: httpx.Response) -> bytes:
    """The whole body. Raises Refused (502)."""
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _LONGEST_ANSWER:
                raise Refused(502, "the backend's answer does not end", "server_error")
    except httpx.HTTPError as error:
        raise Refused(502, f"the backend's answer broke off: {error!r}", "server_error") from error
    return bytes(body)


class Chunks:
    """The chunks of a stream up to [DONE]. `done`: that was said. Iterating raises Broken, TooLong, httpx.HTTPError."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.done = False

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Once."""
        events, pieces = Events(), self._response.aiter_raw()
        async for piece in pieces:
            for data in events.feed(piece):
                if data == b"[DONE]":
                    self.done = True
                    await _read_out(pieces)
                    return
                yield _chunk(data)
        for data in events.close():
            if data == b"[DONE]":
                self.done = True
                return
            yield _chunk(data)


async def _read_out(pieces: AsyncIterator[bytes]) -> None:
    """Reads the end of a body behind [DONE], for a moment: only then can its connection be used again."""
    with suppress(TimeoutError, httpx.HTTPError):  # all has been said: then the connection is closed, and no more
        async with asyncio.timeout(_READ_OUT_S):
            async for _ in pieces:
                pass


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Broken("the backend's stream holds what is no JSON") from error
    if not isinstance(chunk, dict):
        raise Broken("the backend's stream holds what is no object")
    if chunk.get("error") and not chunk.get("choices"):
        raise Broken(message_of(data))
    return chunk


def message_of(body: bytes) -> str:
    """The message of an error body, or the raw text of one that has none."""
    try:
        error: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")[:2000]
    error = error.get("error", error) if isinstance(error, dict) else error
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
