"""The bridge's routes: paths, bodies and status codes of earlier systems, and new ones (docs/reference/bridge.md)."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Security
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from starlette.types import Send

from schemas import topics
from tentalis.gateway.api.bodies import (
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
from tentalis.gateway.api.checked_route import checked_route
from tentalis.gateway.api.events import NAMES
from tentalis.gateway.api.service import LONGEST_POLL_S, Bridge, not_recorded
from tentalis.gateway.api.training import TrainingStatus
from tentalis.gateway.calls.session_id import RECORD, recorded
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Caller, Keys
from tentalis.gateway.http.response import WorkResponse, send_piece
from tentalis.gateway.http.usage import KeyUsage

LONGEST_WATCH_S = 3600.0
_WHY = {
    400: "The body is not a JSON object, or a header is invalid.",
    401: "Missing, unknown or revoked API key.",
    403: "The key lacks the scope, or the resource belongs to another user.",
    404: "Not found within the horizon.",
    408: "The body did not arrive in time.",
    409: "The id is already used for other content, or the turn has no task for the feedback.",
    413: "The body or the record is too large.",
    422: "The body or a parameter is invalid.",
    503: "The log is unavailable: retrying the same request is safe.",
}
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

UserId = Annotated[str, Header(alias="X-User-Id", max_length=200, description="The user of the request.")]
Record = Annotated[
    str,
    Header(
        alias="X-Tentalis-Record",
        description="`off`: nothing is recorded. Empty: the same as leaving it out.",
        json_schema_extra={"enum": ["on", "off", ""]},
    ),
]
RecordTask = Annotated[
    str,
    Header(
        alias="X-Tentalis-Record",
        description="`off` is refused: a task exists only as a record.",
        json_schema_extra={"enum": ["on", ""]},
    ),
]
IdempotencyKey = Annotated[
    str, Header(alias="Idempotency-Key", max_length=200, description="Determines the id if the body gives none.")
]


def _codes(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _WHY[code]} for code in codes}


_KEY_REQUIRED = [Security(_BEARER)]
_WRITTEN = _codes(400, 401, 403, 408, 409, 413, 422, 503)


def _caller_of(request: Request, user: str) -> tuple[Caller, str]:
    caller: Caller = request.state.caller
    user_id = caller.user_id(user)
    # A service's key that acts for a user has access to that user's records only.
    return caller.model_copy(update={"user": user_id or None}), user_id


def _kept(word: str) -> bool:
    return recorded({RECORD: word})


def router(
    bridge: Bridge,
    keys: Keys,
    *,
    body_bytes: int,
    body_s: float,
    count: Callable[[str, int], None] = lambda path, status: None,
    usage: KeyUsage | None = None,
    longest_poll_s: float = LONGEST_POLL_S,
    longest_watch_s: float = LONGEST_WATCH_S,
) -> APIRouter:
    """Builds the routes of a bridge, which runs while the application does.

    Args:
        body_bytes, body_s: size limit of a body, and time limit for its arrival (s).
        count: called with the path and status of every answer.
        usage: the usage of the API keys, and their limits.
        longest_poll_s: longest wait of a task status request.
        longest_watch_s: longest duration of an event stream.
    """

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with bridge.running():
            yield

    usage = usage or KeyUsage(KeyLimits())
    routes = APIRouter(route_class=checked_route(keys, body_bytes, body_s, count, usage), lifespan=lifespan)
    _add_tasks(routes, bridge, longest_poll_s)
    _add_feedback(routes, bridge)
    _add_sessions(routes, bridge)
    _add_training(routes, bridge, longest_watch_s, usage)
    return routes


def _add_tasks(routes: APIRouter, bridge: Bridge, longest_poll_s: float) -> None:
    @routes.post(
        "/tasks/assign", status_code=201, responses=_WRITTEN | _codes(404), dependencies=_KEY_REQUIRED, tags=["tasks"]
    )
    async def assign(
        request: Request, body: TaskBody, user: UserId = "", key: IdempotencyKey = "", record: RecordTask = "on"
    ) -> Assigned:
        """Writes a task to the log. A task exists only as a record, so `X-Tentalis-Record: off` is refused."""
        caller, user_id = _caller_of(request, user)
        if not _kept(record):
            raise APIError(422, "a task exists only as a record on the log: remove X-Tentalis-Record: off")
        return await bridge.assign(body, caller, user_id, key)

    @routes.post("/tasks/result", status_code=201, responses=_WRITTEN, dependencies=_KEY_REQUIRED, tags=["tasks"])
    async def result(request: Request, body: ResultBody, user: UserId = "", record: Record = "on") -> ResultTaken:
        """Writes a worker's result to the log; the task need not be on the log."""
        caller, user_id = _caller_of(request, user)
        if not _kept(record):
            return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id="", status="not_recorded")
        return await bridge.result(body, caller, user_id)

    @routes.get(
        "/tasks/{task_id}/status", responses=_codes(401, 403, 422, 503), dependencies=_KEY_REQUIRED, tags=["tasks"]
    )
    async def status(
        request: Request,
        task_id: Annotated[str, Path(pattern=r"^[!-.0-~]{1,200}$")],
        wait: Annotated[float, Query(ge=0, le=LONGEST_POLL_S, description="Seconds to wait for results.")] = (
            LONGEST_POLL_S
        ),
        user: UserId = "",
    ) -> TaskStatus:
        """Returns the results of a task, immediately or as soon as they arrive. An unknown task is reported as pending
        immediately."""
        caller, _ = _caller_of(request, user)
        return await bridge.status(task_id, min(wait, longest_poll_s), caller)


def _add_feedback(routes: APIRouter, bridge: Bridge) -> None:
    @routes.post(
        "/feedback", status_code=201, responses=_WRITTEN | _codes(404), dependencies=_KEY_REQUIRED, tags=["feedback"]
    )
    async def feedback(request: Request, body: FeedbackBody, user: UserId = "", record: Record = "on") -> FeedbackTaken:
        """Writes a manager's feedback on a task to the log."""
        caller, _ = _caller_of(request, user)
        if not _kept(record):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.feedback(body, caller)

    @routes.post(
        "/v1/feedback", status_code=201, responses=_WRITTEN | _codes(404), dependencies=_KEY_REQUIRED, tags=["feedback"]
    )
    async def user_feedback(
        request: Request, body: UserFeedbackBody, user: UserId = "", record: Record = "on"
    ) -> FeedbackTaken:
        """Writes a person's feedback on a turn to the log: thumbs, a grade, a comment."""
        caller, user_id = _caller_of(request, user)
        if not _kept(record):
            return FeedbackTaken(task_id=body.task_id, feedback_id="", status="not_recorded")
        return await bridge.user_feedback(body, caller, user_id)


def _add_sessions(routes: APIRouter, bridge: Bridge) -> None:
    @routes.post("/sessions/log", status_code=201, responses=_WRITTEN, dependencies=_KEY_REQUIRED, tags=["sessions"])
    async def log_session(
        request: Request, body: SessionBody, user: UserId = "", record: Record = "on"
    ) -> SessionLogged:
        """Writes a turn that was answered elsewhere to the log."""
        caller, user_id = _caller_of(request, user)
        if not _kept(record):
            return SessionLogged(session_id=body.session_id, session_event_id="", status="not_recorded")
        return await bridge.log_session(body, caller, user_id)

    @routes.post("/v1/traces", status_code=201, responses=_WRITTEN, dependencies=_KEY_REQUIRED, tags=["sessions"])
    async def traces(request: Request, body: TracesBody, user: UserId = "", record: Record = "on") -> TracesTaken:
        """Writes items recorded by `tentalis.traces` to the log, each separately."""
        caller, user_id = _caller_of(request, user)
        if not _kept(record):
            return not_recorded(body.items)
        return await bridge.traces(body.items, caller, user_id)


def _add_training(routes: APIRouter, bridge: Bridge, longest_watch_s: float, usage: KeyUsage) -> None:
    @routes.get("/training/status", responses=_codes(401, 403, 503), dependencies=_KEY_REQUIRED, tags=["training"])
    async def training(request: Request) -> TrainingStatus:
        """Returns the training runs, the served policies, and the members and lag of the consumer groups."""
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
        dependencies=_KEY_REQUIRED,
        tags=["training"],
    )
    async def events(
        request: Request,
        types: Annotated[
            str | None,
            Query(description="Event types, comma-separated. All if left out.", pattern=_TYPES, max_length=200),
        ] = None,
        seconds: Annotated[float, Query(gt=0, le=LONGEST_WATCH_S, description="Duration of the stream.")] = (
            LONGEST_WATCH_S
        ),
        user: UserId = "",
    ) -> WorkResponse:
        """Streams live events: ids and numbers, never the text of a conversation. A client that reads too slowly gets
        the event `dropped` and is disconnected."""
        caller, _ = _caller_of(request, user)
        names = frozenset(NAMES if types is None else types.split(","))
        stream = bridge.events.watch(
            names,
            caller.user,
            min(seconds, longest_watch_s),
            everybody=caller.sees_everybody,
            key_id=caller.key_id,
            max_of_key=usage.limits_of(caller).event_streams,
        )

        async def send_all(send: Send) -> None:
            async with aclosing(stream):
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS_HEAD})
                async for event in stream:
                    await send_piece(send, event)
            await send_piece(send, b"", last=True)

        return WorkResponse(send_all)

    @routes.get("/health", tags=["training"])
    async def health() -> HealthAnswer:
        """Reports if the bridge can read and write the log, and which stream applications have halted."""
        return await bridge.health()
