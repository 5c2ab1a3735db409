"""Sends a call to its backend, with retries, until it answers or the call fails."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response

from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.calls.backend_request import refuses_token_ids
from tentalis.gateway.calls.call import ADAPTER_WAIT_S, RETRY_AFTER_S, CallBuilder, GatewayCall
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.sse import EventParser
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.openai import ClientProtocol
from tentalis.gateway.settings import SwapMode, TokenIdSupport

_MAX_PAUSE_S = 2.0
# Headers of the backend that are passed on to the client.
_RELAYED_HEADERS = ("retry-after", "content-type")
_MAX_ANSWER_BYTES = 256 * 2**20
# Longest wait for the end of a stream after its [DONE]; it usually follows immediately.
_DRAIN_S = 0.1


class RelayedError(APIError):
    """A backend's error, passed on to the client."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(status, f"the backend answered {status}")
        self.body, self.relayed_headers = body, headers

    def response(self, protocol: ClientProtocol, headers: Mapping[str, str]) -> Response:
        """The backend's body unchanged in OpenAI's shape; other shapes carry its message."""
        if protocol.native_errors:
            return Response(self.body, self.status, {**headers, **self.relayed_headers})
        relayed_headers = {name: value for name, value in self.relayed_headers.items() if name != "content-type"}
        body = protocol.error(self.status, "api_error", error_message(self.body))
        return JSONResponse(body, status_code=self.status, headers={**headers, **relayed_headers})


class BrokenStream(Exception):
    """The backend's stream is malformed or incomplete."""


class BackendCall:
    """Asks backends. `hold_s`: longest wait for a backend that swaps its weights."""

    def __init__(self, backends: BackendClients, calls: CallBuilder, metrics: GatewayMetrics, hold_s: float) -> None:
        self._backends, self._calls, self._metrics, self._hold_s = backends, calls, metrics, hold_s

    async def send(self, call: GatewayCall) -> httpx.Response:
        """Returns the backend's successful response, unread. Raises RelayedError for an error response, and
        APIError."""
        pause, deadline = 0.1, None
        while True:
            backend = self._backends[call.route.backend.name]
            response = await backend.post(
                call.protocol.path, call.backend_request.body, {"x-request-id": call.event_id}
            )
            if response.status_code == 200:
                if call.token_refusal:
                    backend.pause_token_ids(call.token_refusal)
                return response
            try:
                body = backend.redact(await read_body(response))
            finally:
                await response.aclose()
            text = body.decode("utf-8", "replace")
            auto = call.route.backend.token_ids is TokenIdSupport.AUTO
            if call.asks_token_ids and auto and refuses_token_ids(response.status_code, text):
                # The client's own fields may be the cause: the tokens are, only if the call succeeds without them.
                call.token_refusal = text
                self._calls.rebuild_request(call)
                continue
            if response.status_code < 400:
                raise APIError(
                    502, f"the backend {backend.settings.name} answered {response.status_code}", "server_error"
                )
            retry_s = self._retry_seconds(call, response.status_code)
            if retry_s is None:
                headers = {name: response.headers[name] for name in _RELAYED_HEADERS if name in response.headers}
                raise RelayedError(response.status_code, body, headers)
            now = time.monotonic()
            deadline = deadline or now + retry_s
            if now >= deadline:
                reason = "is loading new weights" if response.status_code == 503 else f"has no {call.route.model} now"
                raise APIError(
                    503,
                    f"the backend {backend.settings.name} {reason}; try again",
                    "server_error",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._metrics.holds.inc()
            await asyncio.sleep(min(pause, deadline - now))
            pause = min(_MAX_PAUSE_S, 2 * pause)
            self._calls.reroute(call, unknown_model=response.status_code == 404)

    def _retry_seconds(self, call: GatewayCall, status: int) -> float | None:
        """Seconds for which a refusal is retried; None if it is passed on."""
        if status == 503 and call.route.backend.swap is SwapMode.HOLD:
            return self._hold_s
        if status == 404 and call.route.policy and not call.route.pinned and not call.route.unserved:
            return min(ADAPTER_WAIT_S, self._hold_s)
        return None


async def read_body(response: httpx.Response) -> bytes:
    """Reads the whole body. Raises APIError (502)."""
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise APIError(502, "the backend's answer is too long", "server_error")
    except httpx.HTTPError as error:
        raise APIError(502, f"the backend's answer broke off: {error!r}", "server_error") from error
    return bytes(body)


class ChunkStream:
    """The chunks of a stream up to [DONE]. `done`: [DONE] came. Iterating raises BrokenStream, EventTooLong,
    httpx.HTTPError."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.done = False

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks; can be iterated once."""
        events, pieces = EventParser(), self._response.aiter_raw()
        async for piece in pieces:
            for data in events.feed(piece):
                if data == b"[DONE]":
                    self.done = True
                    await _drain(pieces)
                    return
                yield _chunk(data)
        for data in events.close():
            if data == b"[DONE]":
                self.done = True
                return
            yield _chunk(data)


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    """Briefly reads the rest of a body after [DONE]: only then can its connection be reused."""
    with suppress(TimeoutError, httpx.HTTPError):  # the answer is complete; the connection is only not reused
        async with asyncio.timeout(_DRAIN_S):
            async for _ in pieces:
                pass


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenStream("the backend's stream holds invalid JSON") from error
    if not isinstance(chunk, dict):
        raise BrokenStream("the backend's stream holds JSON that is not an object")
    if chunk.get("error") and not chunk.get("choices"):
        raise BrokenStream(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """The message of an error body, or its raw text if it has none."""
    try:
        error: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")[:2000]
    error = error.get("error", error) if isinstance(error, dict) else error
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
