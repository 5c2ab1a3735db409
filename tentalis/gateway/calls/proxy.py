"""Handles one call: checks the key, routes it, asks the backend, records the turn, and ends the answer."""

import json
import logging
from collections.abc import Mapping

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from tentalis.gateway.backends.backend import BackendAnswer, BackendClients
from tentalis.gateway.backends.served import ServedView
from tentalis.gateway.calls.backend_call import (
    AnswerBrokeOff,
    BackendCall,
    BrokenStream,
    RelayedError,
    error_message,
    read_body,
)
from tentalis.gateway.calls.call import CallBuilder, GatewayCall
from tentalis.gateway.calls.call_span import call_span, note_answer
from tentalis.gateway.calls.capture import AnswerCapture, strip_unrequested
from tentalis.gateway.calls.count_tokens import TokenCounter
from tentalis.gateway.calls.earlier_turns import EarlierTurns
from tentalis.gateway.calls.session_id import MAIN, RECORD, USER_ID, call_session, recorded
from tentalis.gateway.calls.streaming import MALFORMED_ANSWER, StreamRelay
from tentalis.gateway.calls.turn_writer import TurnNotRecorded, TurnWriter
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Keys, Scope, presented
from tentalis.gateway.http.response import WorkResponse, send_response
from tentalis.gateway.http.sse import EventTooLong
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.openai import ClientProtocol, dumps
from tentalis.gateway.recording.recorder import TurnRecorder
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.replicas.router import CallOutcome
from tentalis.service.tracing import TraceSpan

log = logging.getLogger(__name__)


class ModelProxy:
    """Answers calls. Keeps no session state: any gateway may answer a session's next call."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        backends: BackendClients,
        served: ServedView,
        recorder: TurnRecorder,
        metrics: GatewayMetrics,
        usage: KeyUsage,
        earlier_turns: EarlierTurns,
    ) -> None:
        self._settings, self._keys, self._backends, self._metrics = settings, keys, backends, metrics
        self._usage = usage
        self._calls = CallBuilder(settings, keys, backends, served, metrics, usage, earlier_turns)
        self.count_tokens = TokenCounter(settings, keys, self._calls, backends, usage).answer
        self._backend_call = BackendCall(backends, self._calls, metrics, settings.hold_s)
        self._turn_writer = TurnWriter(recorder, metrics, settings.gateway_id)

    async def answer(self, request: Request, protocol: ClientProtocol) -> Response:
        """Returns the answer to one call, or an error response."""
        try:
            call = await self._calls.build(request, protocol)
        except APIError as error:
            return _error_response(protocol, error, {})
        return WorkResponse(lambda send: self._answer(call, send))

    async def end_session(self, request: Request, session_id: str) -> dict[str, str]:
        """Records the end of a session. Raises APIError, NotRecorded."""
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        if not session_id:
            raise APIError(400, "the path names no session: POST /v1/sessions/{id}/end")
        if caller.episode is not None:
            raise APIError(403, "the session of an episode ends with its program", "permission_error")
        user_id = caller.user_id(request.headers.get(USER_ID))
        if not recorded({RECORD: request.headers.get(RECORD, "")}):
            return {"status": "not_recorded", "session_id": session_id}
        body = {"session_id": session_id}
        session = call_session({}, body, (), namespace=caller.namespace(user_id), owner="", user_id="", default=MAIN)
        await self._turn_writer.record_end(session.session_id, user_id)
        return {"status": "ended", "session_id": session_id}

    async def episode(self, request: Request) -> dict[str, str | None]:
        """Returns how calls of an episode's key are answered, so that a worker finds a wrong key or a missing policy
        before its program starts. Raises APIError: 401, 403 for another key, 404 without the policy, 503."""
        grant = self._keys.caller(presented(request.headers.raw), Scope.CHAT).episode
        if grant is None:
            raise APIError(403, "GET /v1/episode needs the key of an episode", "permission_error")
        route = await self._calls.episode_route(grant)
        return {"session_id": grant.session_id, "policy": grant.policy, "model": route.model}

    async def finish(self) -> None:
        """Waits for turns that are being recorded."""
        await self._turn_writer.wait()

    async def _answer(self, call: GatewayCall, send: Send) -> None:
        try:
            with self._usage.running(call.caller), call_span(call) as span:
                try:
                    await self._forward(call, send, span)
                except APIError as error:
                    span.fail(str(error.status), str(error))
                    raise
        except APIError as error:
            self._metrics.calls.labels(call.protocol.path, str(error.status)).inc()
            if error.status >= 500 and _is_recorded_as_failed(call, error):
                await self._turn_writer.record_failed(call, AnswerCapture())
            await send_response(send, _error_response(call.protocol, error, call.headers))

    async def _forward(self, call: GatewayCall, send: Send, span: TraceSpan) -> None:
        while True:
            answer = await self._backend_call.send(call)
            try:
                call.replica_mode = await self._backends.logprobs.settled_mode(call.route.backend, answer.lease.url)
                if call.backend_request.stream:
                    await self._send_stream(call, answer, send, span)
                else:
                    await self._send_whole(call, answer, send, span)
                return
            except AnswerBrokeOff as error:
                answer.outcome = CallOutcome.FAILED
                call.failed_replicas.add(answer.lease.url)
                call.failure = call.failure or error
                log.warning("call %s: the replica %s failed: %s", call.event_id, answer.lease.url, error)
            finally:
                await answer.close()

    async def _send_whole(self, call: GatewayCall, backend_answer: BackendAnswer, send: Send, span: TraceSpan) -> None:
        body = await read_body(backend_answer.response)
        backend_answer.outcome = CallOutcome.OK
        name = call.route.backend.name
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise self._no_completion_error(call, "answered without a completion", body)
        capture = AnswerCapture(call.backend_request.n)
        capture.add(answer)
        self._usage.spend(call.caller, capture.tokens)
        note_answer(span, call, capture)
        strip_unrequested(answer, call.backend_request.requested)
        headers = call.success_headers(trainable=not call.not_trainable_reason(capture))
        try:
            encoded = dumps(call.protocol.answer(answer, call.event_id, call.body))
        except MALFORMED_ANSWER as error:
            raise APIError(502, f"the backend {name} answered without a completion", "server_error") from error
        await self._turn_writer.record(call, capture)
        self._metrics.call_finished(call.protocol.path, call.started)
        await send_response(send, Response(encoded, headers=headers, media_type="application/json"))

    async def _send_stream(self, call: GatewayCall, answer: BackendAnswer, send: Send, span: TraceSpan) -> None:
        response = answer.response
        content_type = response.headers.get("content-type", "")
        if not content_type.startswith("text/event-stream"):
            answer.outcome = CallOutcome.OK
            body = await read_body(response) if content_type.startswith("application/json") else b""
            raise self._no_completion_error(call, "was asked for a stream and sent none", body)
        relay = StreamRelay(call, send)

        spent = False

        async def record_turn() -> None:
            nonlocal spent
            spent = True
            self._usage.spend(call.caller, relay.capture.tokens)
            answer.outcome = CallOutcome.OK
            await self._turn_writer.record(call, relay.capture)
            self._metrics.call_finished(call.protocol.path, call.started)

        try:
            await relay.relay(response, record_turn)
        except (BrokenStream, EventTooLong, httpx.HTTPError, TurnNotRecorded) as error:
            error_text = (str(error) or repr(error)).encode()
            message = self._backends[call.route.backend.name].redact(error_text).decode("utf-8", "replace")
            log.warning("call %s failed: %s", call.event_id, message)
            if isinstance(error, httpx.HTTPError):
                answer.outcome = CallOutcome.FAILED
                if not relay.started:
                    raise AnswerBrokeOff(502, message, "server_error") from error
            if not relay.started:
                raise error if isinstance(error, TurnNotRecorded) else APIError(502, message, "server_error") from error
            self._metrics.calls.labels(call.protocol.path, "broken").inc()
            span.fail("broken", message)
            if _is_recorded_as_failed(call, error):
                await self._turn_writer.record_failed(call, relay.capture)
            await relay.send_error(message)
        finally:
            note_answer(span, call, relay.capture)
            if not spent:  # also of a client that hung up: a stream that is read almost to its end is not free
                self._usage.spend(call.caller, relay.capture.tokens)

    def _no_completion_error(self, call: GatewayCall, problem: str, body: bytes) -> APIError:
        """The error for a backend's answer without a completion, with the error message in its body."""
        name = call.route.backend.name
        detail = f": {error_message(self._backends[name].redact(body))}" if b'"error"' in body else ""
        return APIError(502, f"the backend {name} {problem}{detail}", "server_error")


def _is_recorded_as_failed(call: GatewayCall, error: Exception) -> bool:
    """Returns True if a failed call is recorded. The turn of a conversation that cannot be recorded is not: its client
    sends it again. The worker of an episode must hear of it, as soon as the log takes records again."""
    return call.caller.episode is not None or not isinstance(error, TurnNotRecorded)


def _error_response(protocol: ClientProtocol, error: APIError, headers: Mapping[str, str]) -> Response:
    if isinstance(error, RelayedError):
        return error.response(protocol, headers)
    body = protocol.error(error.status, error.kind, str(error))
    return JSONResponse(body, status_code=error.status, headers={**headers, **error.headers})
