"""Routes that check the key, the query and the body of a request, and answer errors as earlier systems do."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from schemas.problems import problems
from tentalis.gateway.http.bodies import body_of
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Keys, Scope, presented
from tentalis.gateway.http.usage import KeyUsage

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
"""The scope that a key needs, by path; None: no key is required."""


def checked_route(
    keys: Keys, body_bytes: int, body_s: float, count: Callable[[str, int], None], usage: KeyUsage
) -> type[APIRoute]:
    """Returns a class of routes that check the key before anything else, accept JSON with any content type, and answer
    errors in the format of earlier systems. The caller is in the request's state."""

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
                        usage.admit(request.state.caller)
                    if not known.issuperset(request.query_params):
                        there = f"this path takes {', '.join(sorted(known))}" if known else "this path takes none"
                        raise APIError(422, f"unknown query parameter: {there}")
                    if request.method == "POST":
                        request = _with(request, await body_of(request, body_bytes, body_s))
                    return await handle(request)
                except APIError as error:
                    return _refusal(error.status, str(error), error.headers)
                except RequestValidationError as error:
                    return _refusal(422, problems(error.errors(), "body", unsaid=("body",)))

            return handler

    return Route


def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": why}, status, headers)


def _with(request: Request, body: dict[str, Any]) -> Request:
    """Returns the same request with the body that was read and parsed."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    read = Request(dict(request.scope) | {"headers": [*headers, (b"content-type", b"application/json")]})
    # Starlette caches a body that it has read in these attributes.
    read._body, read._json = b"read", body
    return read
