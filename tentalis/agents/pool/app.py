"""The pool of environments as an HTTP application: the contract of docs/reference/env-pool.md."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from tentalis.agents.pool.leases import Lease, LeasePool
from tentalis.agents.pool.metrics import PoolMetrics
from tentalis.agents.pool.refusals import PoolError
from tentalis.agents.pool.tasks import task_of
from tentalis.service.health import Health
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

LARGEST_BODY = 8 << 20
"""Bytes of the body of a call."""
CALLER_GONE = "the caller closed the connection"
Body = dict[str, Any]


def build_app(pool: LeasePool, environment: str, key: str | None) -> FastAPI:
    """The application of a pool; it ends all leases when it shuts down. `environment`: the name of the environment of
    its episodes. `key`: calls must carry it as bearer token; None: no call from a page of a browser is answered."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        expiry = asyncio.create_task(pool.expire(), name="env-pool-expiry")
        yield
        expiry.cancel()
        await asyncio.gather(expiry, return_exceptions=True)
        await pool.close_all()

    app = FastAPI(title="tentalis env-pool", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    metrics = PoolMetrics(pool)
    health = Health(metrics.exporter, lambda: pool.stuck, lambda: pool.stuck)

    async def allocate(given: Body) -> Body:
        request_id = given.get("request_id")
        lease, reused = pool.allocate(_text(given, "task_key"), None if request_id is None else str(request_id))
        return {
            "lease_id": lease.lease_id,
            "holder": lease.holder,
            "reused": reused,
            "lease_s": pool.limits.lease_s,
        }

    async def heartbeat(given: Body) -> Body:
        pool.heartbeat(_text(given, "lease_id"), _holder(given))
        return {}

    async def reset(given: Body) -> Body:
        meta = _object(given, "task_meta")

        def task(lease: Lease) -> Any:
            return task_of(environment, f"{lease.lease_id}.{lease.number + 1}", now_ms(), meta)

        return await pool.reset(_text(given, "lease_id"), _holder(given), task)

    async def exec_tool(given: Body) -> Body:
        call = _object(given, "tool_call")
        name, arguments = _text(call, "name"), call.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise _bad("tool_call.arguments is no JSON object")
        return await pool.work(_text(given, "lease_id"), _holder(given), lambda each: each.call(name, arguments))

    async def evaluate(given: Body) -> Body:
        answer = given.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise _bad("answer is no text")
        return await pool.evaluate(_text(given, "lease_id"), _holder(given), answer)

    async def close(given: Body) -> Body:
        return {"found": await pool.close(_text(given, "lease_id"), _holder(given))}

    for call in (allocate, heartbeat, reset, exec_tool, evaluate, close):
        _add_call(app, f"/{call.__name__}", call, key, metrics)

    @app.get("/healthz")
    @app.get("/readyz")
    @app.get("/metrics")
    @app.get("/status")
    async def answer_health(request: Request) -> Response:
        if request.url.path in ("/metrics", "/status"):
            try:
                check_caller(request, key)
            except PoolError as error:
                return JSONResponse(error.body, error.status, error.headers)
        if request.url.path == "/status":
            counts = {"places": pool.limits.places, "leases": pool.held, "ending": pool.ending}
            return JSONResponse({"ok": True, "pool": {"environment": environment, **counts}})
        answer = health.answer(request.url.path)
        return Response(answer.body, answer.status, {"Content-Type": answer.content_type})

    return app


def check_caller(request: Request, key: str | None) -> None:
    """Raises PoolError: 401 without the key; 403 for a page of a browser, which can reach a pool without a key."""
    if key is None:
        if "origin" in request.headers:
            raise PoolError(403, "BROWSER", "a pool without a key answers no pages of browsers")
        return
    kind, _, presented = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(presented.strip().encode("latin-1"), key.encode()):
        raise PoolError(401, "KEY", "the key of the pool is missing or wrong: Authorization: Bearer KEY")


def _add_call(
    app: FastAPI,
    path: str,
    call: Callable[[Body], Coroutine[Any, Any, Body]],
    key: str | None,
    metrics: PoolMetrics,
) -> None:
    async def answer(request: Request) -> Response:
        started = time.perf_counter()
        try:
            check_caller(request, key)
            given = await _body(request)
            response = _response({"ok": True, **await _while_connected(request, call(given))})
        except PoolError as error:
            response = _AsciiJson(error.body, error.status, error.headers)
        metrics.requests.labels(path, str(response.status_code)).inc()
        metrics.seconds.labels(path).observe(time.perf_counter() - started)
        return response

    app.add_api_route(path, answer, methods=["POST"], response_model=None, name=path)


class _AsciiJson(JSONResponse):
    """JSON that can hold every text, also halves of surrogate pairs."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def _response(answer: Body) -> JSONResponse:
    """Returns an answer as JSON. Raises PoolError for what JSON cannot hold, such as a reward that is NaN."""
    try:
        return _AsciiJson(answer)
    except (TypeError, ValueError) as error:
        log.error("the environment's answer is not JSON: %s: %s", error, str(answer)[:1000])
        raise PoolError(500, "ENVIRONMENT_FAULT", f"the environment's answer is not JSON: {error}") from error


async def _while_connected(request: Request, work: Coroutine[Any, Any, Body]) -> Body:
    """Returns the result of a call; cancels it when its caller is gone, so that nothing runs on for nobody."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    finally:
        working.cancel()
        gone.cancel()
    if working.cancelled():
        raise PoolError(499, "CALLER_GONE", CALLER_GONE)
    return working.result()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Body:
    """Returns the JSON object of a request. Raises PoolError."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > LARGEST_BODY:
                raise PoolError(413, "TOO_LARGE", f"the body has over {LARGEST_BODY} bytes")
    except ClientDisconnect as error:
        raise PoolError(499, "CALLER_GONE", CALLER_GONE) from error
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise _bad("the body is no JSON object")
    return given


def _text(given: Body, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise _bad(f"{name} is missing, or no text")
    return value


def _object(given: Body, name: str) -> Body:
    value = given.get(name)
    if not isinstance(value, dict):
        raise _bad(f"{name} is missing, or no JSON object")
    return value


def _holder(given: Body) -> int | None:
    value = given.get("holder")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise _bad("holder is no whole number")
    return value


def _bad(problem: str) -> PoolError:
    return PoolError(400, "BAD_CALL", problem)
