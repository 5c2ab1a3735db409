"""The gateway as an ASGI application. `GatewayDependencies` holds its dependencies; `install` functions add further
routes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from schemas.wire.codec import Codec
from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.backends.served import ServedView
from tentalis.gateway.calls.earlier_turns import EarlierTurns
from tentalis.gateway.calls.pass_through import PATHS, PassThrough
from tentalis.gateway.calls.proxy import ModelProxy
from tentalis.gateway.http.errors import APIError, openai_error
from tentalis.gateway.http.keys import Caller, Keys, Scope, presented
from tentalis.gateway.http.origin_guard import OriginGuard
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.http.usage_route import add_usage_route
from tentalis.gateway.http.usage_saver import UsageSaver
from tentalis.gateway.http.usage_store import UsageStore
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.anthropic import MessagesProtocol
from tentalis.gateway.protocols.openai import ChatProtocol, ClientProtocol, CompletionProtocol
from tentalis.gateway.protocols.responses import ResponsesProtocol
from tentalis.gateway.recording.event_log import EventLog
from tentalis.gateway.recording.recorder import NotRecorded, TurnRecorder
from tentalis.gateway.settings import GatewaySettings
from tentalis.service.health import WAITING, Health
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayDependencies:
    """The dependencies of the gateway's routes.

    Attributes:
        settings: the gateway's settings.
        kafka: the process's settings, which name the broker.
        codec: encodes and decodes records.
        keys: the API keys and their scopes.
        event_log: acknowledged writes of any record: `await deps.event_log.append(topic, record)`.
        recorder: writes session events to the log or to disk.
        served: the policy versions that the backends serve.
        backends: the HTTP clients of the backends.
        usage_store: keeps the usage of the API keys over a restart.
        metrics: the metrics; `metrics.exporter` takes more.
        local: no API key is required, so only programs of this machine are answered.
        earlier_turns: the recorded turns that responses continue; `earlier_turns.source` is set by what reads the log.
        on_shutdown: called on the event loop at shutdown, to end work that would not end by itself.
    """

    settings: GatewaySettings
    kafka: Settings
    codec: Codec
    keys: Keys
    event_log: EventLog
    recorder: TurnRecorder
    served: ServedView
    backends: BackendClients
    usage_store: UsageStore
    metrics: GatewayMetrics
    local: bool = False
    earlier_turns: EarlierTurns = field(default_factory=EarlierTurns)
    on_shutdown: list[Callable[[], None]] = field(default_factory=list)

    def caller(self, request: Request, scope: Scope) -> Caller:
        """Returns the caller of this request. Raises APIError (401, 403); the application answers with that status."""
        return self.keys.caller(presented(request.headers.raw), scope)


_INFO = """An OpenAI-compatible proxy that records turns. `POST /v1/chat/completions`, `/v1/completions`,
`/v1/responses`, `/v1/embeddings`, `/v1/messages` and `/v1/messages/count_tokens` follow the OpenAI and Anthropic API
references, `/v1/rerank` that of the backend; this page documents the other routes."""
_STATUS_DESCRIPTIONS = {
    400: "Invalid session id or header.",
    401: "Missing, unknown or revoked API key.",
    403: "The key lacks the scope, or belongs to another user.",
    404: "No model of that name.",
    503: "The log, the disk or the key file is unavailable: retrying the same request is safe.",
}


def _responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"description": _STATUS_DESCRIPTIONS[code]} for code in codes}


RouteInstaller = Callable[[FastAPI, GatewayDependencies], None]
"""A function that adds routes to the application while it is built."""


def build_app(deps: GatewayDependencies, extensions: Sequence[RouteInstaller] = ()) -> FastAPI:
    """Builds the application. While it is up, it drains the spool and learns which models the backends serve."""
    usage = KeyUsage(deps.settings.limits)
    saver = UsageSaver(usage, deps.usage_store)
    saver.restore()
    deps.metrics.watch_keys(usage, deps.keys)
    proxy = _model_proxy(deps, usage)

    failures: list[str] = []

    def on_job_done(job: "asyncio.Task[None]") -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("a background task of the gateway failed", exc_info=error)
            failures.append(f"a background task failed: {error!r}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        work = (deps.recorder.drain(), deps.backends.discover_models(), deps.backends.logprobs.run(), saver.run())
        jobs = [asyncio.create_task(each) for each in work]
        for job in jobs:
            job.add_done_callback(on_job_done)
        yield
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await proxy.finish()
        await saver.save()
        await deps.backends.close()

    app = FastAPI(title="Tentalis gateway", description=_INFO, lifespan=lifespan)
    if deps.local:
        app.add_middleware(OriginGuard)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(NotRecorded, _on_not_recorded)
    for status in (404, 405):
        app.add_exception_handler(status, _on_no_route)
    health = Health(
        deps.metrics.exporter,
        lambda: not_ready_reason(deps),
        lambda: deps.event_log.fatal_error or next(iter(failures), None),
    )

    @app.get("/healthz", include_in_schema=False)
    @app.get("/readyz", include_in_schema=False)
    @app.get("/metrics", include_in_schema=False)
    async def answer_health(request: Request) -> Response:
        if request.url.path == "/metrics":
            deps.caller(request, Scope.EVENTS)
        answer = health.answer(request.url.path)
        return Response(answer.body, answer.status, {"Content-Type": answer.content_type})

    _add_proxy_routes(app, proxy)

    pass_through = PassThrough(deps.settings, deps.keys, deps.backends, usage, deps.metrics)
    for path in PATHS:
        _add_pass_through(app, pass_through, path)
    _add_model_routes(app, deps)
    add_usage_route(app, deps.keys, usage, deps.usage_store)

    app.state.usage = usage
    for install in extensions:
        install(app, deps)
    app.state.health = health
    return app


def _add_proxy_routes(app: FastAPI, proxy: ModelProxy) -> None:
    """Adds the routes of calls of models, and those of their tokens, episodes and sessions."""
    _add_call_route(app, proxy, "/v1/chat/completions", ChatProtocol())
    _add_call_route(app, proxy, "/v1/completions", CompletionProtocol())
    _add_call_route(app, proxy, "/v1/messages", MessagesProtocol())
    _add_call_route(app, proxy, "/v1/responses", ResponsesProtocol())

    @app.post("/v1/messages/count_tokens", include_in_schema=False, response_model=None)
    async def count_tokens(request: Request) -> Response:
        """Counts a prompt's tokens with the tokenizer of the backend that would answer."""
        return await proxy.count_tokens(request)

    @app.get("/v1/episode", include_in_schema=False)
    async def episode(request: Request) -> dict[str, Any]:
        """The session, the policy and the version with which calls of an episode's key are answered."""
        return await proxy.episode(request)

    @app.post("/v1/sessions/{session_id:path}/end", responses=_responses(400, 401, 403, 503))
    async def end_session(
        session_id: Annotated[str, Path(json_schema_extra={"pattern": "^[!-.0-~]{1,200}$"})], request: Request
    ) -> dict[str, str]:
        """Ends a session: its last turn gets no next state."""
        return await proxy.end_session(request, session_id)


def _model_proxy(deps: GatewayDependencies, usage: KeyUsage) -> ModelProxy:
    return ModelProxy(
        deps.settings,
        deps.keys,
        deps.backends,
        deps.served,
        deps.recorder,
        deps.metrics,
        usage,
        deps.earlier_turns,
    )


def not_ready_reason(deps: GatewayDependencies) -> str | None:
    """Returns the reason why calls cannot be answered now, or None if they can."""
    if deps.settings.policies and not deps.served.caught_up:
        return "the policy acknowledgements on the log are not fully read yet"
    if not any(deps.backends.base_models.values()):
        return "no backend has listed its models yet"
    if not deps.backends.logprobs.begun:
        return "the log-probs of the backends are not measured yet"
    if deps.event_log.fatal_error is not None:
        return deps.event_log.fatal_error
    if deps.settings.wait_for_versions:
        for policy in deps.settings.policies:
            server_id = deps.backends[policy.backend].settings.server_id
            if server_id is None or deps.served.name(server_id, policy.name) is None:
                return f"{WAITING} the first served version of the policy {policy.name}"
    return None


def _add_call_route(app: FastAPI, proxy: ModelProxy, path: str, protocol: ClientProtocol) -> None:
    async def answer(request: Request) -> Response:
        return await proxy.answer(request, protocol)

    app.add_api_route(path, answer, methods=["POST"], response_model=None, name=path, include_in_schema=False)


def _add_pass_through(app: FastAPI, pass_through: PassThrough, path: str) -> None:
    async def answer(request: Request) -> Response:
        return await pass_through.answer(request, path)

    app.add_api_route(path, answer, methods=["POST"], response_model=None, name=path, include_in_schema=False)


def _add_model_routes(app: FastAPI, deps: GatewayDependencies) -> None:
    @app.get("/v1/models", responses=_responses(401, 403, 503))
    async def models(request: Request) -> dict[str, Any]:
        """Lists the policies and base models that clients can ask for."""
        deps.caller(request, Scope.CHAT)
        return {"object": "list", "data": _models(deps)}

    @app.get("/v1/models/{name:path}", responses=_responses(401, 403, 404, 503))
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Returns one model."""
        deps.caller(request, Scope.CHAT)
        for card in _models(deps):
            if card["id"] == name:
                return card
        raise APIError(404, f"there is no model {name!r} here; GET /v1/models lists the models", "not_found_error")


def _models(deps: GatewayDependencies) -> list[dict[str, Any]]:
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


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    body = openai_error(error.status, error.kind, str(error))
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    reason = f"{path} does not allow {request.method}" if error.status_code == 405 else f"there is no path {path}"
    message = (
        f"{reason}; /docs lists the routes. The base URL of OpenAI's clients ends in /v1, that of Anthropic's does not"
    )
    body = openai_error(error.status_code, "not_found_error", message)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_not_recorded(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    body = openai_error(503, "server_error", "the request cannot be recorded now; try again")
    return JSONResponse(body, status_code=503, headers={"Retry-After": "5"})
