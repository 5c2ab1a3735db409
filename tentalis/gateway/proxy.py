"""One call through the gateway: who asks, where it goes, what comes back; written down before it ends."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from schemas.ids import derived_id, turn_task_id
from schemas.records import LogprobsMode, Message, Sampling, SessionEvent, SessionEventKind, Status
from tentalis.gateway.asking import Asked, asked, not_trainable, refuses_tokens, sampling_of
from tentalis.gateway.backends import Backends
from tentalis.gateway.bodies import body_of
from tentalis.gateway.capture import Capture, strip
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller, Keys, presented
from tentalis.gateway.keys import Scope as KeyScope
from tentalis.gateway.measures import Measures
from tentalis.gateway.messages import checked, normalised, unspoken
from tentalis.gateway.recorder import NotRecorded, Recorder
from tentalis.gateway.routing import Route, route
from tentalis.gateway.served import ServedView
from tentalis.gateway.sessions_of import MAIN, USER_ID, WORKER_ID, Turn, recorded, turn_of
from tentalis.gateway.settings import GatewaySettings, Swap, Tokens
from tentalis.gateway.shapes import Shape
from tentalis.gateway.sse import Events, TooLong
from tentalis.kafka import now_ms

log = logging.getLogger(__name__)

# A version that was acknowledged may not be loaded where its server has just started again.
ADAPTER_S = 30.0
_LONGEST_PAUSE_S = 2.0
_INFORMED_EVERY_S = 0.1
_RETRY_AFTER_S = 5
# Of the backend's headers, those that are for the client.
_RELAYED = ("retry-after", "content-type")
# What it raises to read an answer that is JSON, but not what the API says.
_MISSHAPEN = (AttributeError, TypeError, KeyError, ValueError, IndexError)
_LONGEST_ANSWER = 256 * 2**20


@dataclass(slots=True)
class Call:
    """A call as far as it is known before a backend is asked."""

    event_id: str
    began: float
    shape: Shape
    caller: Caller
    user_id: str
    worker_id: str
    turn: Turn
    keep: bool
    body: dict[str, Any]
    messages: tuple[Message, ...]
    unspoken: str
    route: Route
    ask: Asked
    tokens: bool
    refused_tokens: str = ""

    @property
    def task_id(self) -> str:
        """Of the task that a main turn becomes."""
        return turn_task_id(self.turn.session_id, self.event_id)

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says of the call."""
        said = {"X-Session-Id": self.turn.shown, "X-Request-Id": self.event_id}
        return said | ({"X-Tentalis-Task-Id": self.task_id} if self.keep and self.turn.turn_type == MAIN else {})


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
        self._settings, self._keys, self._backends = settings, keys, backends
        self._served, self._recorder, self._measures = served, recorder, measures
        self._writing: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, shape: Shape) -> Response:
        """The answer to one call, an error included."""
        try:
            call = await self._call(request, shape)
        except Refused as error:
            return self._refused(shape, error, {})
        return _Answer(lambda send: self._run(call, send), self._settings.stall_s)

    async def end_session(self, request: Request, session_id: str) -> dict[str, str]:
        """Writes down that a session is over. Raises Refused, NotRecorded."""
        caller = self._keys.caller(presented(request.headers.raw), KeyScope.CHAT)
        user_id = caller.user_id(request.headers.get(USER_ID))
        body = {"session_id": session_id}
        turn = turn_of({}, body, (), namespace=caller.namespace(user_id), owner="", user_id="", default=MAIN)
        await self._recorder.record(
            SessionEvent(
                session_event_id=str(uuid.uuid4()),
                event_time=now_ms(),
                session_id=turn.session_id,
                kind=SessionEventKind.END,
                user_id=user_id or None,
                done=True,
                gateway_id=self._settings.gateway_id,
            )
        )
        return {"status": "ended", "session_id": session_id}

    async def finish(self) -> None:
        """Waits until what is being written down is."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def _call(self, request: Request, shape: Shape) -> Call:
        began = time.monotonic()
        caller = self._keys.caller(presented(request.headers.raw), KeyScope.CHAT)
        given = await body_of(request, self._settings.body_bytes, self._settings.body_s)
        body = shape.body(given)
        said = checked(shape.messages(body))
        messages = normalised(said)
        headers = {name.lower(): value for name, value in request.headers.items()}
        user_id = caller.user_id(headers.get(USER_ID))
        worker_id = headers.get(WORKER_ID, "")[:200]
        turn = turn_of(
            headers,
            given,
            messages,
            namespace=caller.namespace(user_id),
            owner=caller.key_id,
            user_id=user_id,
            default=self._settings.turn_type if shape.chat else "side",
        )
        self._measures.turns.labels(
            turn.turn_type, turn.decided_by.value, turn.session_by.value, turn.reason or "none"
        ).inc()
        model = body.get("model")
        if not (model is None or isinstance(model, str)):
            raise Refused(400, "model must be a text")
        await self._informed()
        keep, to = recorded(headers), self._route(model, user_id, worker_id)
        ask, tokens = self._aimed(body, to, shape, keep)
        return Call(
            event_id=_event_id(caller, user_id, turn.session_id, headers.get("idempotency-key")),
            began=began,
            shape=shape,
            caller=caller,
            user_id=user_id,
            worker_id=worker_id or self._settings.gateway_id,
            turn=turn,
            keep=keep,
            body=body,
            messages=messages,
            unspoken=unspoken(body, said) if shape.chat else "",
            route=to,
            ask=ask,
            tokens=tokens,
        )

    async def _informed(self) -> None:
        """Waits until it is known what is served: a gateway that has just started would take a policy for untrained and
        ask its base model. Raises Refused (503)."""
        deadline = time.monotonic() + min(ADAPTER_S, self._settings.hold_s)
        while self._settings.policies and not self._served.caught_up:
            if time.monotonic() >= deadline:
                raise Refused(
                    503,
                    "which versions are served cannot be read from the log yet; try again",
                    "server_error",
                    retry_after_s=_RETRY_AFTER_S,
                )
            await asyncio.sleep(_INFORMED_EVERY_S)

    def _route(self, model: str | None, user_id: str, worker_id: str) -> Route:
        return route(
            self._settings,
            model,
            user_id=user_id,
            worker_id=worker_id,
            served=self._served.name,
            base_models=self._backends.base_models,
        )

    def _aimed(
        self, body: dict[str, Any], to: Route, shape: Shape, keep: bool, refused_tokens: str = ""
    ) -> tuple[Asked, bool]:
        """What is asked of the backend, and whether that is for tokens too."""
        tokens = keep and not refused_tokens and self._backends[to.backend.name].tokens
        return asked(body, to, chat=shape.chat, tokens=tokens), tokens

    def _aim(self, call: Call) -> None:
        """Anew, after the route or the backend has changed."""
        call.ask, call.tokens = self._aimed(call.body, call.route, call.shape, call.keep, call.refused_tokens)

    async def _run(self, call: Call, send: Send) -> None:
        try:
            response = await self._ask(call)
            try:
                if call.ask.stream:
                    await self._stream(call, response, send)
                else:
                    await self._whole(call, response, send)
            finally:
                await response.aclose()
        except Refused as error:
            self._measures.calls.labels(call.shape.path, str(error.status)).inc()
            if error.status >= 500 and not isinstance(error, _Unwritten):
                self._keep_failed(call, Capture())
            await _send_whole(send, self._refused(call.shape, error, call.headers))

    async def _ask(self, call: Call) -> httpx.Response:
        """The backend's good answer, not yet read. Raises Refused, RelayedError for one that is not."""
        pause, deadline = 0.1, None
        while True:
            backend = self._backends[call.route.backend.name]
            response = await backend.post(call.shape.path, call.ask.body, {"x-request-id": call.event_id})
            if response.status_code == 200:
                if call.refused_tokens:
                    backend.gives_no_tokens(call.refused_tokens)
                return response
            try:
                body = backend.redacted(await _read(response))
            finally:
                await response.aclose()
            text = body.decode("utf-8", "replace")
            auto = call.route.backend.token_ids is Tokens.AUTO
            if call.tokens and auto and refuses_tokens(response.status_code, text):
                # Perhaps for what the client asked: that was the reason only if the same call goes well without.
                call.refused_tokens = text
                self._aim(call)
                continue
            if response.status_code < 400:
                raise Refused(
                    502, f"the backend {backend.settings.name} answered {response.status_code}", "server_error"
                )
            patience = self._patience(call, response.status_code)
            if patience is None:
                raise _Relayed(response.status_code, body, _relayed_headers(response))
            now = time.monotonic()
            deadline = deadline or now + patience
            if now >= deadline:
                raise Refused(
                    503,
                    f"the backend {backend.settings.name} takes new weights; try again",
                    "server_error",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._measures.holds.inc()
            await asyncio.sleep(min(pause, deadline - now))
            pause = min(_LONGEST_PAUSE_S, 2 * pause)
            if not call.route.pinned:
                call.route = self._route(call.body.get("model"), call.user_id, call.worker_id)
                self._aim(call)

    def _patience(self, call: Call, status: int) -> float | None:
        """For how long a refusal is waited out; None if it is the answer."""
        if status == 503 and call.route.backend.swap is Swap.HOLD:
            return self._settings.hold_s
        if status == 404 and call.route.policy and not call.route.pinned and not call.route.unserved:
            return min(ADAPTER_S, self._settings.hold_s)
        return None

    async def _whole(self, call: Call, response: httpx.Response, send: Send) -> None:
        body = await _read(response)
        backend = self._backends[call.route.backend.name]
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise Refused(
                502, f"the backend {backend.settings.name} answered with what is no completion", "server_error"
            )
        capture = Capture(call.ask.n)
        capture.take(answer)
        strip(answer, call.ask.wants)
        try:
            shown = JSONResponse(call.shape.answer(answer), headers=call.headers)
        except _MISSHAPEN as error:
            raise Refused(
                502, f"the backend {backend.settings.name} answered with no completion", "server_error"
            ) from error
        await self._keep(call, capture)
        self._measures.finished(call.shape.path, call.began)
        await _send_whole(send, shown)

    async def _stream(self, call: Call, response: httpx.Response, send: Send) -> None:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            name = call.route.backend.name
            raise Refused(502, f"the backend {name} was asked for a stream and sent none", "server_error")
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **call.headers}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        shape, capture = call.shape.stream(), Capture(call.ask.n)
        held: list[bytes] = []
        try:
            async for chunk in _chunks(response):
                if "error" in chunk and not chunk.get("choices"):
                    raise _Broken(str(chunk["error"]))
                capture.take(chunk)
                strip(chunk, call.ask.wants)
                try:
                    piece = shape.chunk(chunk)
                except _MISSHAPEN as error:
                    raise _Broken("the backend's stream holds what is no part of a completion") from error
                # Clients take a finish reason for the end: from there on nothing goes out before all is written down.
                if capture.finished or held:
                    held.append(piece)
                elif piece:
                    await _send_piece(send, piece)
            if not capture.finished:
                raise _Broken("the backend's stream ended before its end")
            await self._keep(call, capture)
        except (_Broken, TooLong, httpx.HTTPError, _Unwritten) as error:
            said = (str(error) or repr(error)).encode()
            message = self._backends[call.route.backend.name].redacted(said).decode("utf-8", "replace")
            log.warning("call %s is not completed: %s", call.event_id, message)
            self._measures.calls.labels(call.shape.path, "broken").inc()
            if not isinstance(error, _Unwritten):
                self._keep_failed(call, capture)
            await _send_piece(send, shape.error(502, "server_error", message), last=True)
            return
        self._measures.finished(call.shape.path, call.began)
        await _send_piece(send, b"".join([*held, shape.end()]), last=True)

    async def _keep(self, call: Call, capture: Capture) -> None:
        """Returns when the turn is written down, or is not to be. Raises Refused (503)."""
        if not call.keep:
            self._measures.recorded("off")
            return
        writing = asyncio.create_task(self._recorder.record(self._event(call, capture, Status.OK)))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        try:
            # Whoever hangs up now may have the turn written down all the same: it is complete.
            await asyncio.shield(writing)
        except NotRecorded as error:
            log.error("%s", error)
            raise _Unwritten(
                503, "the turn cannot be written down now; try again", "server_error", retry_after_s=5
            ) from error

    def _keep_failed(self, call: Call, capture: Capture) -> None:
        """Writes down, if it can, that a turn came to nothing."""
        if not call.keep:
            return

        async def write() -> None:
            with suppress(NotRecorded):  # it is counted, and nobody was told that the turn is complete
                await self._recorder.record(self._event(call, capture, Status.FAILED))

        writing = asyncio.create_task(write())
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    def _event(self, call: Call, capture: Capture, status: Status) -> SessionEvent:
        tokens = capture.tokens() if call.tokens else None
        prompt, response, logprobs = tokens or (b"", b"", b"")
        reason = not_trainable(call.ask.body, call.route, capture, tokens=call.tokens, n=call.ask.n)
        if status is Status.FAILED:
            reason = "the call failed"
        self._measures.trainable.labels("no" if reason else "yes").inc()
        return SessionEvent(
            # Who tries again with the same idempotency key must not find the id taken by a failure.
            session_event_id=call.event_id if status is Status.OK else f"{call.event_id}/failed",
            event_time=now_ms(),
            session_id=call.turn.session_id,
            turn_type=call.turn.turn_type,
            worker_id=call.worker_id,
            model=capture.model or call.route.model or "",
            messages=call.messages,
            response=capture.text,
            prompt_token_ids=prompt,
            response_token_ids=response,
            sampler_logprobs=logprobs,
            done=call.turn.done,
            decided_by=call.turn.decided_by.value,
            user_id=call.user_id or None,
            policy=call.route.policy,
            request=call.unspoken,
            tool_calls=capture.tool_calls,
            logprobs_mode=call.route.backend.logprobs_mode if logprobs else LogprobsMode.NONE,
            sampling=sampling_of(call.ask.body) or Sampling(),
            finish_reason=capture.finish_reason,
            status=status,
            not_trainable=reason,
            elapsed_s=time.monotonic() - call.began,
            gateway_id=self._settings.gateway_id,
        )

    def _refused(self, shape: Shape, error: Refused, headers: Mapping[str, str]) -> Response:
        if isinstance(error, _Relayed):
            return error.response(shape, headers)
        body = shape.error(error.status, error.kind, str(error))
        return JSONResponse(body, status_code=error.status, headers={**headers, **error.headers})


class _Unwritten(Refused):
    """Neither the log nor the disk takes the turn."""


class _Broken(Exception):
    """The backend's stream is not what it should be."""


class _Relayed(Refused):
    """A backend's error, for the client as it came."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(status, f"the backend answered {status}")
        self.body, self.relayed = body, headers

    def response(self, shape: Shape, headers: Mapping[str, str]) -> Response:
        """In OpenAI's shape the body as it came; another shape has the message."""
        if shape.native_errors:
            return Response(self.body, self.status, {**headers, **self.relayed})
        said = {name: value for name, value in self.relayed.items() if name != "content-type"}
        body = shape.error(self.status, "api_error", _message(self.body))
        return JSONResponse(body, status_code=self.status, headers={**headers, **said})


def _message(body: bytes) -> str:
    """The message of an error body, or the raw text of one that has none."""
    try:
        error: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")[:2000]
    error = error.get("error", error) if isinstance(error, dict) else error
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]


class _Answer(Response):
    """An answer that is made while it is sent, and given up when its client goes."""

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


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream up to [DONE]. Raises _Broken, TooLong, httpx.HTTPError."""
    events = Events()

    def parsed(data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Broken("the backend's stream holds what is no JSON") from error
        if not isinstance(chunk, dict):
            raise _Broken("the backend's stream holds what is no object")
        return chunk

    async for piece in response.aiter_raw():
        for data in events.feed(piece):
            if data == b"[DONE]":
                return
            yield parsed(data)
    for data in events.close():
        if data == b"[DONE]":
            return
        yield parsed(data)


async def _read(response: httpx.Response) -> bytes:
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


def _relayed_headers(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in _RELAYED if name in response.headers}


async def _send_whole(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await _send_piece(send, bytes(response.body), last=True)


async def _send_piece(send: Send, piece: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": not last})


def _event_id(caller: Caller, user_id: str, session_id: str, idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return str(uuid.uuid4())
    if not 0 < len(idempotency_key) <= 200:
        raise Refused(400, "Idempotency-Key has 1 to 200 characters")
    return derived_id("call", caller.key_id, user_id, session_id, idempotency_key)
