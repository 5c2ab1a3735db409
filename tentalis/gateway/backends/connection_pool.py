"""Connections to one server, with a cost per call that does not grow with their number."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

_MAX_IDLE = 256
_ONE_CONNECTION = httpx.Limits(max_connections=1, max_keepalive_connections=1)


class ConnectionPool(httpx.AsyncBaseTransport):
    """A transport with one pool per connection. httpx checks every idle connection of a pool, with a system call each,
    at the start and at the end of every call. The clients decide the number of concurrent calls.

    A pool whose call did not finish is closed: if a task is cancelled just when httpcore releases a connection, its
    place in the pool stays taken, and the pool's next call would wait for it.

    `url`: the server's; if the environment names a proxy for it, that proxy is used.
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
            transport = self._idle.pop()
        else:
            transport = httpx.AsyncHTTPTransport(verify=self._context, limits=_ONE_CONNECTION, proxy=self._proxy)
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            self._give_back(transport, False)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _PooledStream(response.stream, partial(self._give_back, transport))
        return response

    def _give_back(self, transport: httpx.AsyncHTTPTransport, reusable: bool) -> None:
        if reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append(transport)
            return
        # In a separate task, which is not cancelled with the call.
        task = asyncio.create_task(transport.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Closes the idle connections, and waits for those that are closing."""
        while self._idle:
            self._give_back(self._idle.pop(), False)
        await asyncio.gather(*self._closing)


class _PooledStream(httpx.AsyncByteStream):
    """A response body that returns its pool when it is closed. `give_back`: called with whether it was read whole."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[bool], None]) -> None:
        self._stream, self._give_back, self._closed, self._read_whole = stream, give_back, False, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk
        self._read_whole = True

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        reusable = False
        try:
            await self._stream.aclose()
            reusable = self._read_whole
        finally:
            self._give_back(reusable)
