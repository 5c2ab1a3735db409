"""The bridge's routes: the ancestors' paths, bodies and status codes, and ours besides (docs/bridge.md)."""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import Message

from tentalis.gateway.bridge.events import NAMES
from tentalis.gateway.bridge.service import LONGEST_POLL_S, Bridge, problems
from tentalis.gateway.bridge.shapes import (
    Assigned,
    Error,
    FeedbackBody,
    FeedbackTaken,
    HealthAnswer,
    ResultBody,
    ResultTaken,
    SessionBody,
    SessionLogged,
    TaskBody,
    TaskStatus,
    TracesBody,
    TracesTaken,
    TraceTaken,
    UserFeedbackBody,
)
from tentalis.gateway.bridge.training import TrainingStatus
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller, Keys, Scope, presented
from tentalis.gateway.sessions_of import recorded

LONGEST_WATCH_S = 3600.0
BODY_BYTES = 16 * 2**20
_WHY = {
    400: "The body is no JSON, or a header is wrong.",
    401: "No good API key.",
    403: "The key's scopes do not reach, or it is another user's.",
    404: "Nothing of that name within the horizon.",
    409: "The id stands for something else already.",
    413: "Too large.",
    422: "The body or a parameter is not of its form.",
    503: "The log is away: the same request again is safe.",
}
_BEARER = HTTPBearer(auto_error=False, description="An API key (`tentalis keys create`).")

UserId = Annotated[str | None, Header(alias="X-User-Id", max_length=200, description="Whom it is for.")]
Record = Annotated[
    str | None, Header(alias="X-Tentalis-Record", pattern="^(on|off)$", description="`off`: nothing is written down.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=200, description="Stands for the id where none is given."),
]


def _codes(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _WHY[code]} for code in codes}


def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": why}, status, headers)


class _Route(APIRoute):
    """Takes JSON whatever its content type is called, up to BODY_BYTES, and refuses in the ancestors' shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(await _with_json(request) if request.method == "POST" else request)
            except Refused as error:
                return _refusal(error.status, str(error), error.headers)
            except RequestValidationError as error:
                return _refusal(422, problems(error.errors()))
            except HTTPException as error:
                return _refusal(error.status_code, str(error.detail))

        return handler


async def _with_json(request: Request) -> Request:
    """The same request with its body read. Raises Refused: 400 for what is no JSON, 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise Refused(413, f"the body is longer than {BODY_BYTES:,} bytes")
    try:
        json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    scope = dict(request.scope) | {"headers": [*headers, (b"content-type", b"application/json")]}

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return Request(scope, receive)


def router(
    bridge: Bridge, keys: Keys, *, longest_poll_s: float = LONGEST_POLL_S, longest_watch_s: float = LONGEST_WATCH_S
) -> APIRouter:
    """The routes over a bridge that runs (`Bridge.running`).

    Args:
        longest_poll_s: for which a question may wait.
        longest_watch_s: after which a stream of events ends.
    """
    routes = APIRouter(route_class=_Route)
    asked = [Security(_BEARER)]

    def caller_of(request: Request, scope: Scope, user: str | None = None) -> tuple[Caller, str]:
        caller = keys.caller(presented(request.scope["headers"]), scope)
        return caller, caller.user_id(user)

    def kept(request: Request) -> bool:
        return recorded({name.decode("latin-1"): value.decode("latin-1") for name, value in request.scope["headers"]})

    written = _codes(400, 401, 403, 409, 413, 422, 503)

    @routes.post("/tasks/assign", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["tasks"])
    async def assign(request: Request, body: TaskBody, user: UserId = None, key: IdempotencyKey = None) -> Assigned:
        """Puts a task on the log."""
        caller, user_id = caller_of(request, Scope.TASKS, user)
        return await bridge.assign(body, caller, user_id, key)

    @routes.post("/tasks/result", status_code=201, responses=written, dependencies=asked, tags=["tasks"])
    async def result(request: Request, body: ResultBody, user: UserId = None) -> ResultTaken:
        """Puts a worker's result on the log; the task need not be there."""
        caller, user_id = caller_of(request, Scope.TASKS, user)
        return await bridge.result(body, caller, user_id)

    @routes.get("/tasks/{task_id}/status", responses=_codes(401, 403, 422, 503), dependencies=asked, tags=["tasks"])
    async def status(
        request: Request,
        task_id: Annotated[str, Path(pattern=r"^[!-.0-~]{1,200}$")],
        wait: Annotated[float, Query(ge=0, le=LONGEST_POLL_S, description="Seconds to wait for results.")] = (
            LONGEST_POLL_S
        ),
    ) -> TaskStatus:
        """The results of a task: at once if they are there, else as soon as they are. A task that is not known is
        pending at once."""
        caller, _ = caller_of(request, Scope.TASKS)
        return await bridge.status(task_id, min(wait, longest_poll_s), caller)

    @routes.post("/feedback", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["feedback"])
    async def feedback(request: Request, body: FeedbackBody, record: Record = None) -> FeedbackTaken:
        """Puts a manager's feedback on a task on the log."""
        caller, _ = caller_of(request, Scope.FEEDBACK)
        if not kept(request):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.feedback(body, caller)

    @routes.post(
        "/v1/feedback", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["feedback"]
    )
    async def user_feedback(
        request: Request, body: UserFeedbackBody, user: UserId = None, record: Record = None
    ) -> FeedbackTaken:
        """Puts what a person says of a turn on the log: thumbs, a grade, a comment."""
        caller, user_id = caller_of(request, Scope.FEEDBACK, user)
        if not kept(request):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.user_feedback(body, caller, user_id)

    @routes.post("/sessions/log", status_code=201, responses=written, dependencies=asked, tags=["sessions"])
    async def log_session(
        request: Request, body: SessionBody, user: UserId = None, record: Record = None
    ) -> SessionLogged:
        """Puts a turn on the log that was answered elsewhere."""
        caller, user_id = caller_of(request, Scope.TRACES, user)
        if not kept(request):
            return SessionLogged(session_id=body.session_id, session_event_id="", status="not_recorded")
        return await bridge.log_session(body, caller, user_id)

    @routes.post("/v1/traces", status_code=201, responses=written, dependencies=asked, tags=["sessions"])
    async def traces(request: Request, body: TracesBody, user: UserId = None, record: Record = None) -> TracesTaken:
        """Puts what `tentalis.traces` recorded on the log, each item by itself."""
        caller, user_id = caller_of(request, Scope.TRACES, user)
        if not kept(request):
            return TracesTaken(items=[TraceTaken(id="", status="not_recorded") for _ in body.items])
        return await bridge.traces(body.items, caller, user_id)

    @routes.get("/training/status", responses=_codes(401, 403, 503), dependencies=asked, tags=["training"])
    async def training(request: Request) -> TrainingStatus:
        """What is training, what is served, and who is how far behind."""
        caller_of(request, Scope.EVENTS)
        return await bridge.training()

    @routes.get(
        "/v1/events",
        response_class=StreamingResponse,
        responses=_codes(401, 403, 422, 503)
        | {
            200: {
                "description": "Server-sent events.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
        dependencies=asked,
        tags=["training"],
    )
    async def events(
        request: Request,
        types: Annotated[
            str | None, Query(description=f"Which, with commas: {', '.join(NAMES)}. All if left out.", max_length=200)
        ] = None,
        seconds: Annotated[float, Query(gt=0, le=LONGEST_WATCH_S, description="After which it ends.")] = (
            LONGEST_WATCH_S
        ),
    ) -> StreamingResponse:
        """What happens, as it happens: who and what, never what was said. Whoever does not keep up gets an event
        `dropped` and is disconnected."""
        caller, _ = caller_of(request, Scope.EVENTS)
        names = frozenset(NAMES if types is None else (name for name in types.split(",") if name in NAMES))
        stream = bridge.events.watch(names, caller.user, min(seconds, longest_watch_s))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @routes.get("/health", tags=["training"])
    async def health() -> HealthAnswer:
        """Whether the bridge can do its work."""
        return bridge.health()

    return routes
