"""The gateway as an ASGI application. What it needs comes in `Deps`; further routes come with `install` functions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from schemas.codec import Codec
from tentalis.config import Settings
from tentalis.gateway.anthropic_shape import MessagesShape
from tentalis.gateway.backends import Backends
from tentalis.gateway.entrance import Entrance
from tentalis.gateway.eventlog import EventLog
from tentalis.gateway.failure import Refused, openai_error
from tentalis.gateway.keys import Caller, Keys, Scope, presented
from tentalis.gateway.measures import Measures
from tentalis.gateway.proxy import Proxy
from tentalis.gateway.recorder import NotRecorded, Recorder
from tentalis.gateway.served import ServedView
from tentalis.gateway.settings import GatewaySettings
from tentalis.gateway.shapes import ChatShape, CompletionShape, Shape
from tentalis.health import Health

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deps:
    """What the routes of a gateway work with.

    Attributes:
        settings: of the gateway.
        kafka: of the process; where the broker is.
        codec: of the records.
        keys: who may do what.
        events: acknowledged writing of any record: `await deps.events.append(topic, record)`.
        recorder: session events, to the log or to disk.
        served: which versions the backends serve.
        backends: their clients.
        measures: metrics; `measures.exporter` takes more.
        local: nobody is asked for a key, so that only this machine's own programs are answered.
        leaving: called on the event loop when the process is to end, for what would not end by itself.
    """

    settings: GatewaySettings
    kafka: Settings
    codec: Codec
    keys: Keys
    events: EventLog
    recorder: Recorder
    served: ServedView
    backends: Backends
    measures: Measures
    local: bool = False
    leaving: list[Callable[[], None]] = field(default_factory=list)

    def caller(self, request: Request, scope: Scope) -> Caller:
        """Who makes this request. Raises Refused (401, 403), which the application answers with its status."""
        return self.keys.caller(presented(request.headers.raw), scope)


_PAGE = """An OpenAI-compatible proxy that writes down what is said. `POST /v1/chat/completions`, `/v1/completions`,
`/v1/messages` and `/v1/messages/count_tokens` take and answer what OpenAI and Anthropic say of them; here are the
others."""
_WHY = {
    400: "A session id or a header that is none.",
    401: "No good API key.",
    403: "The key's scopes do not reach, or it is another user's.",
    404: "No model of that name.",
    503: "Not now, for want of the log, the disk or the keys: the same request again is safe.",
}


def _codes(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"description": _WHY[code]} for code in codes}


Install = Callable[[FastAPI, Deps], None]
"""Adds routes to the application, at its making."""


def build_app(deps: Deps, extensions: Sequence[Install] = ()) -> FastAPI:
    """The application over what is already running; it drains the spool and learns models while it is up."""
    proxy = Proxy(deps.settings, deps.keys, deps.backends, deps.served, deps.recorder, deps.measures)

    ended: list[str] = []

    def gone_wrong(job: "asyncio.Task[None]") -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("a job of the gateway ended", exc_info=error)
            ended.append(f"a job of it ended: {error!r}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        jobs = [asyncio.create_task(deps.recorder.drain()), asyncio.create_task(deps.backends.learn())]
        for job in jobs:
            job.add_done_callback(gone_wrong)
        yield
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await proxy.finish()
        await deps.backends.close()

    app = FastAPI(title="Tentalis gateway", description=_PAGE, lifespan=lifespan)
    if deps.local:
        app.add_middleware(Entrance)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(NotRecorded, _on_not_recorded)
    for status in (404, 405):
        app.add_exception_handler(status, _on_no_route)
    health = Health(
        deps.measures.exporter, lambda: not_ready(deps), lambda: deps.events.fatal or next(iter(ended), None)
    )

    @app.get("/healthz", include_in_schema=False)
    @app.get("/readyz", include_in_schema=False)
    @app.get("/metrics", include_in_schema=False)
    async def answer_health(request: Request) -> Response:
        if request.url.path == "/metrics":
            deps.caller(request, Scope.EVENTS)
        answer = health.answer(request.url.path)
        return Response(answer.body, answer.status, {"Content-Type": answer.content_type})

    _add(app, proxy, "/v1/chat/completions", ChatShape())
    _add(app, proxy, "/v1/completions", CompletionShape())
    _add(app, proxy, "/v1/messages", MessagesShape())

    @app.get("/v1/models", responses=_codes(401, 403, 503))
    async def models(request: Request) -> dict[str, Any]:
        """The policies and base models that can be asked for."""
        deps.caller(request, Scope.CHAT)
        return {"object": "list", "data": _models(deps)}

    @app.get("/v1/models/{name:path}", responses=_codes(401, 403, 404, 503))
    async def model(name: str, request: Request) -> dict[str, Any]:
        """One of them."""
        deps.caller(request, Scope.CHAT)
        for card in _models(deps):
            if card["id"] == name:
                return card
        raise Refused(404, f"there is no model {name!r} here; GET /v1/models says which there are", "not_found_error")

    @app.post("/v1/messages/count_tokens", include_in_schema=False, response_model=None)
    async def count_tokens(request: Request) -> Response:
        """How many tokens a prompt has, by the tokenizer of the backend that would be asked."""
        return await proxy.count_tokens(request)

    @app.post("/v1/sessions/{session_id:path}/end", responses=_codes(400, 401, 403, 503))
    async def end_session(
        session_id: Annotated[str, Path(json_schema_extra={"pattern": "^[!-.0-~]{1,200}$"})], request: Request
    ) -> dict[str, str]:
        """Ends a session: its last turn gets no next state."""
        return await proxy.end_session(request, session_id)

    for install in extensions:
        install(app, deps)
    app.state.health = health
    return app


def not_ready(deps: Deps) -> str | None:
    """Why no call would be answered well now, None if one would."""
    if deps.settings.policies and not deps.served.caught_up:
        return "the acknowledgements of the policies are not read to their end yet"
    if not any(deps.backends.base_models.values()):
        return "no backend has said which models it serves yet"
    return deps.events.fatal


def _add(app: FastAPI, proxy: Proxy, path: str, shape: Shape) -> None:
    async def answer(request: Request) -> Response:
        return await proxy.answer(request, shape)

    app.add_api_route(path, answer, methods=["POST"], response_model=None, name=path, include_in_schema=False)


def _models(deps: Deps) -> list[dict[str, Any]]:
    card = {"object": "model", "created": 0, "owned_by": "tentalis"}
    backends = {backend.name: backend for backend in deps.settings.backends}
    cards: dict[str, dict[str, Any]] = {}
    for policy in deps.settings.policies:
        server = backends[policy.backend].server_id
        assert server is not None
        cards[policy.name] = {"id": policy.name, **card, "root": deps.served.name(server, policy.name)}
    for name, models in deps.backends.base_models.items():
        for model in models:
            cards.setdefault(model, {"id": model, **card, "owned_by": name})
    return list(cards.values())


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    body = openai_error(error.status, error.kind, str(error))
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    why = f"{request.method} is not for {path}" if error.status_code == 405 else f"there is no {path} here"
    message = (
        f"{why}; /docs says what there is. The base URL of OpenAI's clients ends in /v1, that of Anthropic's does not"
    )
    body = openai_error(error.status_code, "not_found_error", message)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_not_recorded(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    body = openai_error(503, "server_error", "this cannot be written down now; try again")
    return JSONResponse(body, status_code=503, headers={"Retry-After": "5"})
