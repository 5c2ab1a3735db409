"""Reads request bodies: bounded in size, time and nesting, and valid JSON."""

import asyncio
import json
from math import isfinite
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tentalis.gateway.http.errors import APIError

# At most this many bytes of a refused body are read and dropped, so that the client can read the answer.
_MAX_DISCARDED_BYTES = 64 * 2**20
_PARSED_ON_LOOP_BYTES = 64 * 2**10
# Later code, here and in the backend, walks through bodies recursively. Tool schemas have about ten levels.
MAX_NESTING = 100


async def body_of(request: Request, max_bytes: int, time_limit_s: float) -> dict[str, Any]:
    """Returns the JSON object in the body. Raises APIError: 400, 408 (too slow), 413 (over `max_bytes` bytes)."""
    try:
        async with asyncio.timeout(time_limit_s):
            data = await _read(request, max_bytes)
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {time_limit_s:g} s") from error
    except ClientDisconnect as error:
        raise APIError(400, "the client disconnected before the end of the body") from error
    if len(data) <= _PARSED_ON_LOOP_BYTES:
        return parse_object(data)
    # On a thread, so that a large body delays other clients' streams less.
    return await asyncio.to_thread(parse_object, data)


async def _read(request: Request, max_bytes: int) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            body += chunk
        elif size > max_bytes + _MAX_DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise APIError(413, f"the body is larger than the limit of {max_bytes:,} bytes")
    return bytes(body)


def parse_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object in `data`. Raises APIError (400) for invalid JSON or UTF-8, another JSON type, non-finite
    numbers, lone surrogates, and nesting deeper than MAX_NESTING."""
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_finite_number, parse_float=_finite_number)
        if _nested_deeper(body, MAX_NESTING):
            raise APIError(400, f"the body is nested deeper than {MAX_NESTING} levels, which is the limit")
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(body, ensure_ascii=False).encode()  # raises for a lone surrogate
    except UnicodeEncodeError as error:
        raise APIError(400, "the body holds a lone surrogate, which is not valid text") from error
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(body, dict):
        raise APIError(400, "the body must be a JSON object")
    return body


def _finite_number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is not a valid JSON number")
    return value


def _nested_deeper(value: Any, max_depth: int) -> bool:
    """True if lists and objects are nested more than `max_depth` deep; computed without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
