"""Connections to a backend: used again, as many as there are calls, and replaced where one is broken."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tentalis.gateway.backends.connection_pool import ConnectionPool
from tentalis.gateway.calls import backend_call


class Server:
    """Answers every request with two chunks, the second when `gate` is open. `connections`: those taken so far."""

    def __init__(self) -> None:
        self.chunks = (b"ab", b"c")
        self.gate = asyncio.Event()
        self.gate.set()
        self.hang_up = False
        self.connections = 0
        self.asked: list[bytes] = []
        self.heard = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head.split(b"\r\n")[0])
                self.heard.release()
                first, second = (b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in self.chunks)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + first)
                await self.gate.wait()
                if self.hang_up:
                    return
                writer.write(second + b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def run(body: Callable[[Server, httpx.AsyncClient, str], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server()
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(transport=ConnectionPool(url), timeout=60) as client:
                await body(server, client, url)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_connection_is_used_again_and_as_many_as_calls_are_open() -> None:
    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        for _ in range(3):
            assert (await client.get(url)).text == "abc"
        assert server.connections == 1
        server.gate.clear()
        calls = [asyncio.create_task(client.get(url)) for _ in range(8)]
        for _ in range(3 + 8):
            await server.heard.acquire()
        assert server.connections == 8
        server.gate.set()
        assert [answer.text for answer in await asyncio.gather(*calls)] == ["abc"] * 8
        assert (await asyncio.gather(*(client.get(url) for _ in range(8)))) and server.connections == 8

    run(body)


def test_the_connection_of_a_stream_is_used_again_and_its_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_call, "_DRAIN_S", 10.0)

    async def streamed(client: httpx.AsyncClient, url: str) -> list[dict[str, object]]:
        async with client.stream("GET", url) as response:
            return [chunk async for chunk in backend_call.ChunkStream(response)]

    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        server.chunks = (b'data: {"a": 1}\n\ndata: [DONE]\n\n', b"\n")
        for _ in range(3):
            assert await streamed(client, url) == [{"a": 1}]
        assert server.connections == 1
        server.gate.clear()
        monkeypatch.setattr(backend_call, "_DRAIN_S", 0.01)
        assert await streamed(client, url) == [{"a": 1}], "although nothing comes behind [DONE]"
        server.gate.set()
        assert await streamed(client, url) == [{"a": 1}] and server.connections == 2

    run(body)


def test_what_breaks_off_or_is_given_up_costs_its_own_connection_alone() -> None:
    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        server.hang_up = True
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(url)
        server.hang_up = False
        assert (await client.get(url)).text == "abc" and server.connections == 2
        server.gate.clear()
        given_up = asyncio.create_task(client.get(url))
        for _ in range(3):
            await server.heard.acquire()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        server.gate.set()
        assert (await client.get(url)).text == "abc" and server.connections == 3
        async with client.stream("GET", url) as early:
            assert early.status_code == 200  # closed without having been read
        assert (await client.get(url)).text == "abc"

    run(body)


@pytest.mark.parametrize("times", [1, 2])
def test_whenever_a_call_is_given_up_the_next_one_is_answered(times: int) -> None:
    """At every turn of the event loop, and once more at the next: the connection may be in any state."""

    async def streamed(client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("GET", url) as response:
            async for _ in response.aiter_raw():
                await asyncio.sleep(0)

    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        for turns in range(200):
            call = asyncio.create_task(streamed(client, url))
            for _ in range(turns):
                await asyncio.sleep(0)
            if call.done():
                return
            for _ in range(times):
                call.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(call, return_exceptions=True)
            async with asyncio.timeout(5):
                assert (await client.get(url)).text == "abc"

    run(body)


def test_a_refused_connection_is_an_error_and_the_next_call_tries_again() -> None:
    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")
        assert (await client.get(url)).text == "abc"

    run(body)


def test_a_proxy_of_the_environment_is_used_but_for_whom_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server, client: httpx.AsyncClient, url: str) -> None:
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "near.example")
        async with httpx.AsyncClient(transport=ConnectionPool("http://far.example"), timeout=60) as through:
            assert (await through.get("http://far.example/x")).text == "abc"
        assert server.asked == [b"GET http://far.example/x HTTP/1.1"]
        assert ConnectionPool("http://near.example")._proxy is None

    run(body)
