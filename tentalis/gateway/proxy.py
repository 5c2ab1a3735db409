"""One call through the gateway: who asks, where it goes, what comes back; written down before it ends."""

import json
import logging
from collections.abc import Mapping

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from tentalis.gateway.answering import Answer, send_whole
from tentalis.gateway.asking import not_trainable
from tentalis.gateway.backends import Backends
from tentalis.gateway.calls import Call, Calls
from tentalis.gateway.capture import Capture, strip
from tentalis.gateway.counting import Counting
from tentalis.gateway.exchange import Broken, Exchange, Relayed, message_of, read
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Keys, Scope, presented
from tentalis.gateway.measures import Measures
from tentalis.gateway.recorder import Recorder
from tentalis.gateway.served import ServedView
from tentalis.gateway.sessions_of import MAIN, RECORD, USER_ID, recorded, turn_of
from tentalis.gateway.settings import GatewaySettings
from tentalis.gateway.shapes import Shape, dumps
from tentalis.gateway.sse import TooLong
from tentalis.gateway.streaming import MISSHAPEN, Streaming
from tentalis.gateway.writing import Unwritten, Writing

log = logging.getLogger(__name__)


class Proxy:
    """Answers calls. Keeps nothing of a session: any gateway may answer the next call of it."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        backends: Backends,
        served: ServedView,
        recorder: Recorder,
        measures: Measures,
    ) -> None:
        self._settings, self._keys, self._backends, self._measures = settings, keys, backends, measures
        self._calls = Calls(settings, keys, backends, served, measures)
        self.count_tokens = Counting(settings, keys, self._calls, backends).answer
        self._exchange = Exchange(backends, self._calls, measures, settings.hold_s)
        self._writing = Writing(recorder, measures, settings.gateway_id)

    async def answer(self, request: Request, shape: Shape) -> Response:
        """The answer to one call, an error included."""
        try:
            call = await self._calls.of(request, shape)
        except Refused as error:
            return _refusal(shape, error, {})
        return Answer(lambda send: self._run(call, send))

    async def end_session(self, request: Request, session_id: str) -> dict[str, str]:
        """Writes down that a session is over. Raises Refused, NotRecorded."""
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        if not session_id:
            raise Refused(400, "the path names no session: POST /v1/sessions/{id}/end")
        user_id = caller.user_id(request.headers.get(USER_ID))
        if not recorded({RECORD: request.headers.get(RECORD, "")}):
            return {"status": "not_recorded", "session_id": session_id}
        body = {"session_id": session_id}
        turn = turn_of({}, body, (), namespace=caller.namespace(user_id), owner="", user_id="", default=MAIN)
        await self._writing.end(turn.session_id, user_id)
        return {"status": "ended", "session_id": session_id}

    async def finish(self) -> None:
        """Waits until what is being written down is."""
        await self._writing.finish()

    async def _run(self, call: Call, send: Send) -> None:
        try:
            response = await self._exchange.ask(call)
            try:
                if call.ask.stream:
                    await self._stream(call, response, send)
                else:
                    await self._whole(call, response, send)
            finally:
                await response.aclose()
        except Refused as error:
            self._measures.calls.labels(call.shape.path, str(error.status)).inc()
            if error.status >= 500 and not isinstance(error, Unwritten):
                self._writing.keep_failed(call, Capture())
            await send_whole(send, _refusal(call.shape, error, call.headers))

    async def _whole(self, call: Call, response: httpx.Response, send: Send) -> None:
        body = await read(response)
        name = call.route.backend.name
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise self._no_completion(call, "answered with what is no completion", body)
        capture = Capture(call.ask.n)
        capture.take(answer)
        strip(answer, call.ask.wants)
        trainable = not not_trainable(call.ask.body, call.route, capture, tokens=call.tokens, n=call.ask.n)
        headers = call.answered(trainable=trainable)
        try:
            shown = dumps(call.shape.answer(answer, call.event_id))
        except MISSHAPEN as error:
            raise Refused(502, f"the backend {name} answered with no completion", "server_error") from error
        await self._writing.keep(call, capture)
        self._measures.finished(call.shape.path, call.began)
        await send_whole(send, Response(shown, headers=headers, media_type="application/json"))

    async def _stream(self, call: Call, response: httpx.Response, send: Send) -> None:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            body = await read(response) if kind.startswith("application/json") else b""
            raise self._no_completion(call, "was asked for a stream and sent none", body)
        streaming = Streaming(call, send)

        async def keep() -> None:
            await self._writing.keep(call, streaming.capture)
            self._measures.finished(call.shape.path, call.began)

        try:
            await streaming.passes(response, keep)
        except (Broken, TooLong, httpx.HTTPError, Unwritten) as error:
            said = (str(error) or repr(error)).encode()
            message = self._backends[call.route.backend.name].redacted(said).decode("utf-8", "replace")
            log.warning("call %s is not completed: %s", call.event_id, message)
            if not streaming.begun:
                raise error if isinstance(error, Unwritten) else Refused(502, message, "server_error") from error
            self._measures.calls.labels(call.shape.path, "broken").inc()
            if not isinstance(error, Unwritten):
                self._writing.keep_failed(call, streaming.capture)
            await streaming.breaks_off(message)

    def _no_completion(self, call: Call, what: str, body: bytes) -> Refused:
        """The refusal of a backend's answer that is none, with the error that its body tells of."""
        name = call.route.backend.name
        told = f": {message_of(self._backends[name].redacted(body))}" if b'"error"' in body else ""
        return Refused(502, f"the backend {name} {what}{told}", "server_error")


def _refusal(shape: Shape, error: Refused, headers: Mapping[str, str]) -> Response:
    if isinstance(error, Relayed):
        return error.response(shape, headers)
    body = shape.error(error.status, error.kind, str(error))
    return JSONResponse(body, status_code=error.status, headers={**headers, **error.headers})
