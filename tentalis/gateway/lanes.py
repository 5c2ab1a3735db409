"""Connections to one server, at a price that does not grow with their number."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

_MOST_IDLE = 256
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1)


class Lanes(httpx.AsyncBaseTransport):
    """Each connection is a pool of its own: httpx looks at every idle connection of a pool, with a system call each, at
    the beginning and at the end of every call. How many calls run at once is the clients' decision.

    A pool whose call did not come to its end is closed: a task that is cancelled just when httpcore gives a connection
    up leaves the place of that connection taken, and the next call of the pool would wait for it.

    `url`: of the server; where the environment names a proxy for it, that is used.
    """

    def __init__(self, url: str) -> None:
        self._context = httpx.create_ssl_context()
        parts = urlsplit(url)
        self._proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncBaseTransport."""
        if self._idle:
            lane = self._idle.pop()
        else:
            lane = httpx.AsyncHTTPTransport(verify=self._context, limits=_ONE, proxy=self._proxy)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            self._take_back(lane, False)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Lent(response.stream, partial(self._take_back, lane))
        return response

    def _take_back(self, lane: httpx.AsyncHTTPTransport, whole: bool) -> None:
        if whole and len(self._idle) < _MOST_IDLE:
            self._idle.append(lane)
            return
        # In a task of its own, which nobody cancels with the call.
        task = asyncio.create_task(lane.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Closes what is idle, and waits for what is being closed."""
        while self._idle:
            self._take_back(self._idle.pop(), False)
        await asyncio.gather(*self._closing)


class _Lent(httpx.AsyncByteStream):
    """The body of an answer, whose lane is free when it is closed. `take_back`: told whether it was read whole."""

    def __init__(self, stream: httpx.AsyncByteStream, take_back: Callable[[bool], None]) -> None:
        self._stream, self._take_back, self._closed, self._read = stream, take_back, False, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece
        self._read = True

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        whole = False
        try:
            await self._stream.aclose()
            whole = self._read
        finally:
            self._take_back(whole)
