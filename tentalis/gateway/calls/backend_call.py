"""Sends a call to its backend, with retries, until it answers or the call fails."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response

from tentalis.gateway.backends.backend import BackendAnswer, BackendClient, BackendClients, VersionNotListed
from tentalis.gateway.calls.backend_request import refuses_token_ids
from tentalis.gateway.calls.call import ADAPTER_WAIT_S, RETRY_AFTER_S, CallBuilder, GatewayCall
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.sse import EventParser
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.openai import ClientProtocol
from tentalis.gateway.settings import SwapMode, TokenIdSupport
from tentalis.inference.replicas.router import FAILURES_PER_CALL, CallOutcome, is_version

log = logging.getLogger(__name__)

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


@dataclass(slots=True)
class _Waits:
    """The waits of a call. `deadline`: when they end, set by the first."""

    pause: float = 0.1
    deadline: float | None = None


class BackendCall:
    """Asks backends. `hold_s`: longest wait for a backend that swaps its weights."""

    def __init__(self, backends: BackendClients, calls: CallBuilder, metrics: GatewayMetrics, hold_s: float) -> None:
        self._backends, self._calls, self._metrics, self._hold_s = backends, calls, metrics, hold_s

    async def send(self, call: GatewayCall) -> BackendAnswer:
        """Returns the successful response of the call's backend, or of a fallback, unread. Raises RelayedError for an
        error response, and APIError: the first one, if the fallbacks fail too."""
        while True:
            try:
                return await self._send_to_backend(call)
            except APIError as error:
                failed = call.route.backend.name
                if error.status < 500 and not (error.status == 404 and call.route.instead_of is not None):
                    raise
                call.failure = call.failure or error
                if not self._calls.fall_back(call):
                    raise call.failure from None
                to = call.route.backend.name
                log.warning(
                    "%s cannot answer (%s): the fallback %s is asked for %s", failed, error, to, call.route.model
                )
                self._metrics.fallbacks.labels(call.route.policy, to).inc()

    async def _send_to_backend(self, call: GatewayCall) -> BackendAnswer:
        """Returns the successful response of a replica of the call's backend. A replica that fails is followed by
        another one; refusals that pass by are waited for. Raises as `send`."""
        waits = _Waits()
        while True:
            backend = self._backends[call.route.backend.name]
            try:
                answer, body = await self._ask(call, backend)
            except VersionNotListed as error:
                await self._wait(call, waits, error)
                continue
            if body is None:
                return answer
            status = answer.response.status_code
            text = body.decode("utf-8", "replace")
            auto = call.route.backend.token_ids is TokenIdSupport.AUTO
            if call.asks_token_ids and auto and refuses_token_ids(status, text):
                # The client's own fields may be the cause: the tokens are, only if the call succeeds without them.
                call.token_refusal = text
                self._calls.rebuild_request(call)
                continue
            if status < 400:
                raise APIError(502, f"the backend {backend.settings.name} answered {status}", "server_error")
            if (status >= 500 or answer.outcome is CallOutcome.MISSING) and self._another(call, backend, answer):
                continue
            relayed = answer.response.headers
            headers = {name: relayed[name] for name in _RELAYED_HEADERS if name in relayed}
            await self._wait(call, waits, RelayedError(status, body, headers))

    async def _wait(self, call: GatewayCall, waits: "_Waits", refusal: APIError) -> None:
        """Waits before a refused call is sent again, and routes it anew. Raises the refusal if it does not pass by, and
        APIError (503) after the longest wait."""
        retry_s = self._retry_seconds(call, refusal.status)
        if retry_s is None:
            raise refusal
        now = time.monotonic()
        waits.deadline = waits.deadline or now + retry_s
        if now >= waits.deadline:
            reason = "is loading new weights" if refusal.status == 503 else f"has no {call.route.model} now"
            raise APIError(
                503,
                f"the backend {call.route.backend.name} {reason}; try again",
                "server_error",
                retry_after_s=RETRY_AFTER_S,
            )
        self._metrics.holds.inc()
        await asyncio.sleep(min(waits.pause, waits.deadline - now))
        waits.pause = min(_MAX_PAUSE_S, 2 * waits.pause)
        call.failed_replicas.clear()
        self._calls.reroute(call, unknown_model=refusal.status == 404)

    async def _ask(self, call: GatewayCall, backend: BackendClient) -> tuple[BackendAnswer, bytes | None]:
        """Asks one replica. Returns its answer, and the body of an error; None for a successful answer, which is
        unread."""
        answer = await backend.post(
            call.protocol.path,
            call.backend_request.body,
            {"x-request-id": call.event_id},
            key=call.session.session_id,
            failed=call.failed_replicas,
            last_resort=not self._calls.has_fallback(call),
        )
        if answer.response.status_code == 200:
            if call.token_refusal:
                backend.pause_token_ids(call.token_refusal)
            return answer, None
        try:
            body = backend.redact(await read_body(answer.response))
            answer.outcome = self._outcome(call, answer.response.status_code)
            return answer, body
        finally:
            await answer.close()

    def _outcome(self, call: GatewayCall, status: int) -> CallOutcome:
        """The outcome of an error response. A backend that swaps its weights by answering 503 has not failed."""
        if status == 404 and is_version(call.route.model):
            return CallOutcome.MISSING
        holding = status == 503 and call.route.backend.swap is SwapMode.HOLD
        return CallOutcome.FAILED if status >= 500 and not holding else CallOutcome.OK

    def _another(self, call: GatewayCall, backend: BackendClient, answer: BackendAnswer) -> bool:
        """True if another replica may answer a call that one has failed, or had not the version for."""
        call.failed_replicas.add(answer.lease.url)
        again = len(call.failed_replicas) < FAILURES_PER_CALL and backend.router.able(
            call.route.model, without=call.failed_replicas, any_state=not self._calls.has_fallback(call)
        )
        if again and answer.outcome is CallOutcome.MISSING:
            log.warning("the replica %s has lost %s", answer.lease.url, call.route.model)
        return again

    def _retry_seconds(self, call: GatewayCall, status: int) -> float | None:
        """Seconds for which a refusal is retried; None if it is passed on."""
        if status == 503 and call.route.backend.swap is SwapMode.HOLD:
            return self._hold_s
        fixed = call.route.pinned or call.route.unserved or call.route.instead_of is not None
        if status == 404 and call.route.policy and not fixed:
            return min(ADAPTER_WAIT_S, self._hold_s)
        return None


class AnswerBrokeOff(APIError):
    """An answer ended before its end, of which the client has seen nothing: another replica may be asked."""


async def read_body(response: httpx.Response) -> bytes:
    """Reads the whole body. Raises APIError (502), AnswerBrokeOff (502)."""
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise APIError(502, "the backend's answer is too long", "server_error")
    except httpx.HTTPError as error:
        raise AnswerBrokeOff(502, f"the backend's answer broke off: {error!r}", "server_error") from error
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
