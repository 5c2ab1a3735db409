"""The body of a request: bounded in size and time, and JSON that every part of the way can carry."""

import asyncio
import json
from math import isfinite
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tentalis.gateway.failure import Refused

# A refused body is read to its end and dropped, so that the client can hear the answer; but not for ever.
_HEARD_OUT = 64 * 2**20
# What comes after this one walks through bodies by recursion, here and in the backend. Schemas of tools have some ten.
DEEPEST = 100


async def body_of(request: Request, most: int, within_s: float) -> dict[str, Any]:
    """The object that the body holds. Raises Refused: 400, 408 (too slow), 413 (over `most` bytes)."""
    try:
        async with asyncio.timeout(within_s):
            data = await _read(request, most)
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {within_s:g} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "the body broke off") from error
    return parsed(data)


async def _read(request: Request, most: int) -> bytes:
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
        elif size > most + _HEARD_OUT:
            break
    if size > most:
        raise Refused(413, f"the body has more than {most:,} bytes, which is the most that is taken here")
    return bytes(body)


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object. Raises Refused (400) for anything else: no JSON in UTF-8, no object, numbers and texts that are
    none, and what is nested deeper than DEEPEST."""
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_number, parse_float=_number)
        if _nested_deeper(body, DEEPEST):
            raise Refused(400, f"the body is nested deeper than {DEEPEST} levels, which is the most that is taken here")
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate is no text
    except UnicodeEncodeError as error:
        raise Refused(400, "the body holds a lone surrogate, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no number of JSON's")
    return value


def _nested_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` deep; without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
