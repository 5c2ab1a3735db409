"""The bridge's routes: the ancestors' paths, bodies and status codes, and ours besides (docs/bridge.md)."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import Send

from schemas import topics
from schemas.problems import problems
from tentalis.gateway.answering import Answer, send_piece
from tentalis.gateway.bodies import body_of
from tentalis.gateway.bridge.events import NAMES
from tentalis.gateway.bridge.service import LONGEST_POLL_S, Bridge, not_recorded
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
    UserFeedbackBody,
)
from tentalis.gateway.bridge.training import TrainingStatus
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller, Keys, Scope, presented
from tentalis.gateway.sessions_of import RECORD, recorded

LONGEST_WATCH_S = 3600.0
_WHY = {
    400: "The body is no JSON object, or a header is wrong.",
    401: "No good API key.",
    403: "The key's scopes do not reach, or it is another user's.",
    404: "Nothing of that name within the horizon.",
    408: "The body did not come in time.",
    409: "The id stands for something else already, or the turn has no task that feedback could be on.",
    413: "Too large.",
    422: "The body or a parameter is not of its form.",
    503: "The log is away: the same request again is safe.",
}
SCOPES: dict[str, Scope | None] = {
    "/tasks/assign": Scope.TASKS,
    "/tasks/result": Scope.TASKS,
    "/tasks/{task_id}/status": Scope.TASKS,
    "/feedback": Scope.FEEDBACK,
    "/v1/feedback": Scope.FEEDBACK,
    "/sessions/log": Scope.TRACES,
    "/v1/traces": Scope.TRACES,
    "/training/status": Scope.EVENTS,
    "/v1/events": Scope.EVENTS,
    "/health": None,
}
"""What a key must be good for, by path; None: nobody is asked for one."""
_BEARER = HTTPBearer(auto_error=False, description="An API key (`tentalis keys create`).")

_TYPES = f"^({'|'.join(NAMES)})(,({'|'.join(NAMES)}))*$"
_EVENT = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["event", "data"],
}
_EVENTS_HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

UserId = Annotated[str, Header(alias="X-User-Id", max_length=200, description="Whom it is for.")]
Record = Annotated[
    str,
    Header(
        alias="X-Tentalis-Record",
        description="`off`: nothing is written down. Empty: as if left out.",
        json_schema_extra={"enum": ["on", "off", ""]},
    ),
]
RecordTask = Annotated[
    str,
    Header(
        alias="X-Tentalis-Record",
        description="`off` is refused: a task is nothing but a record.",
        json_schema_extra={"enum": ["on", ""]},
    ),
]
IdempotencyKey = Annotated[
    str, Header(alias="Idempotency-Key", max_length=200, description="Stands for the id where none is given.")
]


def _codes(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _WHY[code]} for code in codes}


def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": why}, status, headers)


def _route_class(keys: Keys, body_bytes: int, body_s: float, count: Callable[[str, int], None]) -> type[APIRoute]:
    """Routes that look at the key before anything else, take JSON whatever its content type is called, and refuse in
    the ancestors' shape. The caller is in the request's state."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            known = {parameter.alias for parameter in self.dependant.query_params}
            scope = SCOPES[self.path]

            async def handler(request: Request) -> Response:
                response = await answer(request)
                count(self.path, response.status_code)
                return response

            async def answer(request: Request) -> Response:
                try:
                    if scope is not None:
                        request.state.caller = keys.caller(presented(request.scope["headers"]), scope)
                    if not known.issuperset(request.query_params):
                        there = f"there are {', '.join(sorted(known))}" if known else "there are none"
                        raise Refused(422, f"a parameter behind the ? that nobody knows: {there}")
                    if request.method == "POST":
                        request = _with(request, await body_of(request, body_bytes, body_s))
                    return await handle(request)
                except Refused as error:
                    return _refusal(error.status, str(error), error.headers)
                except RequestValidationError as error:
                    return _refusal(422, problems(error.errors(), "body", unsaid=("body",)))

            return handler

    return Route


def _with(request: Request, body: dict[str, Any]) -> Request:
    """The same request with a body that was read and parsed."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    read = Request(dict(request.scope) | {"headers": [*headers, (b"content-type", b"application/json")]})
    # Where Starlette keeps what it has read itself.
    read._body, read._json = b"read", body
    return read


def router(
    bridge: Bridge,
    keys: Keys,
    *,
    body_bytes: int,
    body_s: float,
    count: Callable[[str, int], None] = lambda path, status: None,
    longest_poll_s: float = LONGEST_POLL_S,
    longest_watch_s: float = LONGEST_WATCH_S,
) -> APIRouter:
    """The routes over a bridge, which runs while the application does.

    Args:
        body_bytes, body_s: the longest body, and how long it may take (s).
        count: called with the path and status of every answer.
        longest_poll_s: for which a question may wait.
        longest_watch_s: after which a stream of events ends.
    """

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with bridge.running():
            yield

    routes = APIRouter(route_class=_route_class(keys, body_bytes, body_s, count), lifespan=lifespan)
    asked = [Security(_BEARER)]

    def caller_of(request: Request, user: str) -> tuple[Caller, str]:
        caller: Caller = request.state.caller
        user_id = caller.user_id(user)
        # A service's key that speaks for a user sees and touches what is that user's alone.
        return caller.model_copy(update={"user": user_id or None}), user_id

    def kept(word: str) -> bool:
        return recorded({RECORD: word})

    written = _codes(400, 401, 403, 408, 409, 413, 422, 503)

    @routes.post("/tasks/assign", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["tasks"])
    async def assign(
        request: Request, body: TaskBody, user: UserId = "", key: IdempotencyKey = "", record: RecordTask = "on"
    ) -> Assigned:
        """Puts a task on the log. It is nothing but a record: what is not to be recorded is refused."""
        caller, user_id = caller_of(request, user)
        if not kept(record):
            raise Refused(422, "a task is given out on the log and nowhere else: leave X-Tentalis-Record: off away")
        return await bridge.assign(body, caller, user_id, key)

    @routes.post("/tasks/result", status_code=201, responses=written, dependencies=asked, tags=["tasks"])
    async def result(request: Request, body: ResultBody, user: UserId = "", record: Record = "on") -> ResultTaken:
        """Puts a worker's result on the log; the task need not be there."""
        caller, user_id = caller_of(request, user)
        if not kept(record):
            return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id="", status="not_recorded")
        return await bridge.result(body, caller, user_id)

    @routes.get("/tasks/{task_id}/status", responses=_codes(401, 403, 422, 503), dependencies=asked, tags=["tasks"])
    async def status(
        request: Request,
        task_id: Annotated[str, Path(pattern=r"^[!-.0-~]{1,200}$")],
        wait: Annotated[float, Query(ge=0, le=LONGEST_POLL_S, description="Seconds to wait for results.")] = (
            LONGEST_POLL_S
        ),
        user: UserId = "",
    ) -> TaskStatus:
        """The results of a task: at once if they are there, else as soon as they are. A task that is not known is
        pending at once."""
        caller, _ = caller_of(request, user)
        return await bridge.status(task_id, min(wait, longest_poll_s), caller)

    @routes.post("/feedback", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["feedback"])
    async def feedback(request: Request, body: FeedbackBody, user: UserId = "", record: Record = "on") -> FeedbackTaken:
        """Puts a manager's feedback on a task on the log."""
        caller, _ = caller_of(request, user)
        if not kept(record):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.feedback(body, caller)

    @routes.post(
        "/v1/feedback", status_code=201, responses=written | _codes(404), dependencies=asked, tags=["feedback"]
    )
    async def user_feedback(
        request: Request, body: UserFeedbackBody, user: UserId = "", record: Record = "on"
    ) -> FeedbackTaken:
        """Puts what a person says of a turn on the log: thumbs, a grade, a comment."""
        caller, user_id = caller_of(request, user)
        if not kept(record):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.user_feedback(body, caller, user_id)

    @routes.post("/sessions/log", status_code=201, responses=written, dependencies=asked, tags=["sessions"])
    async def log_session(
        request: Request, body: SessionBody, user: UserId = "", record: Record = "on"
    ) -> SessionLogged:
        """Puts a turn on the log that was answered elsewhere."""
        caller, user_id = caller_of(request, user)
        if not kept(record):
            return SessionLogged(session_id=body.session_id, session_event_id="", status="not_recorded")
        return await bridge.log_session(body, caller, user_id)

    @routes.post("/v1/traces", status_code=201, responses=written, dependencies=asked, tags=["sessions"])
    async def traces(request: Request, body: TracesBody, user: UserId = "", record: Record = "on") -> TracesTaken:
        """Puts what `tentalis.traces` recorded on the log, each item by itself."""
        caller, user_id = caller_of(request, user)
        if not kept(record):
            return not_recorded(body.items)
        return await bridge.traces(body.items, caller, user_id)

    @routes.get("/training/status", responses=_codes(401, 403, 503), dependencies=asked, tags=["training"])
    async def training(request: Request) -> TrainingStatus:
        """What is training, what is served, and who is how far behind."""
        return await bridge.training()

    @routes.get(
        "/v1/events",
        response_class=StreamingResponse,
        responses=_codes(401, 403, 422, 503)
        | {
            200: {
                "description": "Server-sent events.",
                "content": {"text/event-stream": {"schema": _EVENT}},
            }
        },
        dependencies=asked,
        tags=["training"],
    )
    async def events(
        request: Request,
        types: Annotated[
            str | None,
            Query(description="Which, with commas between. All if left out.", pattern=_TYPES, max_length=200),
        ] = None,
        seconds: Annotated[float, Query(gt=0, le=LONGEST_WATCH_S, description="After which it ends.")] = (
            LONGEST_WATCH_S
        ),
        user: UserId = "",
    ) -> Answer:
        """What happens, as it happens: who and what, never what was said. Whoever does not keep up gets an event
        `dropped` and is disconnected."""
        caller, _ = caller_of(request, user)
        names = frozenset(NAMES if types is None else types.split(","))
        stream = bridge.events.watch(names, caller.user, min(seconds, longest_watch_s))

        async def send_all(send: Send) -> None:
            async with aclosing(stream):
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS_HEAD})
                async for event in stream:
                    await send_piece(send, event)
            await send_piece(send, b"", last=True)

        return Answer(send_all)

    @routes.get("/health", tags=["training"])
    async def health() -> HealthAnswer:
        """Whether the bridge can do its work."""
        return bridge.health()

    return routes
