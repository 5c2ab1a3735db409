"""Connections to one server, at a price that does not grow with their number."""

from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

_MOST_IDLE = 256
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1)


class Lanes(httpx.AsyncBaseTransport):
    """Each connection is a pool of its own: httpx looks at every idle connection of a pool, with a system call each, at
    the beginning and at the end of every call. How many calls run at once is the clients' decision.

    `url`: of the server; where the environment names a proxy for it, that is used.
    """

    def __init__(self, url: str) -> None:
        self._context = httpx.create_ssl_context()
        parts = urlsplit(url)
        self._proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncBaseTransport."""
        if self._idle:
            lane = self._idle.pop()
        else:
            lane = httpx.AsyncHTTPTransport(verify=self._context, limits=_ONE, proxy=self._proxy)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            self._idle.append(lane)  # it has given its connection up itself
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)

        async def give_back() -> None:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(lane)
            else:
                await lane.aclose()

        response.stream = _Lent(response.stream, give_back)
        return response

    async def aclose(self) -> None:
        """Closes what is idle."""
        while self._idle:
            await self._idle.pop().aclose()


class _Lent(httpx.AsyncByteStream):
    """The body of an answer, whose lane is free when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._give_back, self._closed = stream, give_back, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._stream.aclose()
        finally:
            await self._give_back()
