"""The end of a model server: what is in flight fails at once, or finishes within the time that it is given."""

import asyncio
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tentalis.inference.server import ModelServer
from tests.support.kafka_fixture import eventually


class Engine:
    """Ends a request when it is stopped or told to."""

    def __init__(self) -> None:
        self.stopped, self.done, self.asked = threading.Event(), threading.Event(), threading.Event()

    def stop(self, timeout: float = 5.0) -> None:
        self.stopped.set()

    async def answer(self, request: Request) -> Response:
        self.asked.set()
        while not self.stopped.is_set():
            if self.done.is_set():
                return PlainTextResponse("finished")
            await asyncio.sleep(0.01)
        return PlainTextResponse("stopped", 503)


@pytest.mark.parametrize(
    ("drain_s", "finish", "signals", "answer"),
    [(0.0, False, 1, "stopped"), (60.0, True, 1, "finished"), (0.2, False, 1, "stopped"), (60.0, False, 2, None)],
    ids=["no time", "enough time", "too little time", "a second signal"],
)
def test_requests_in_flight_at_a_stop_signal(drain_s: float, finish: bool, signals: int, answer: str | None) -> None:
    engine, listener = Engine(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = Starlette(routes=[Route("/", engine.answer)])
    server = ModelServer(uvicorn.Config(app, log_level="critical"), engine, drain_s)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    eventually(lambda: server.started, 60, message="the server does not start")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(httpx.get, url, timeout=30)
        assert engine.asked.wait(30)
        for _ in range(signals):
            server.handle_exit(signal.SIGTERM, None)

        def refused() -> bool:
            try:
                httpx.get(url, timeout=1)
            except httpx.TransportError:
                return True
            return False

        eventually(refused, 30, message="new requests are still accepted")
        if finish:
            assert not engine.stopped.is_set()
            engine.done.set()
        if answer is None:
            assert engine.stopped.is_set()
            call.exception(30)
        else:
            assert call.result(30).text == answer
    thread.join(30)
    assert not thread.is_alive()
    listener.close()
