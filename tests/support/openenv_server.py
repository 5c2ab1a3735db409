"""A server with the wire format of OpenEnv's, which answers as a script says: for what a real one rarely does."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

Answer = Mapping[str, Any] | str | None
"""A message, a text as it is, or None: the server closes the connection."""


def observation(reward: float | bool | None = None, *, done: bool = False, **shown: Any) -> dict[str, Any]:
    """The answer to `reset` or `step`."""
    return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    """The answer to a message that fails."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@dataclass
class OpenEnvScript:
    """`answers`: the answer to each message. `full`: the number of sessions that are refused first."""

    answers: Callable[[Mapping[str, Any]], Answer]
    schema: Any = None
    full: int = 0
    got: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def openenv_server(script: OpenEnvScript) -> Iterator[str]:
    """Runs a server; yields its URL."""

    def session(connection: ServerConnection) -> None:
        assert connection.request is not None
        script.keys.append(connection.request.headers.get("Authorization"))
        if script.full:
            script.full -= 1
            connection.send(json.dumps(error("CAPACITY_REACHED", "no free session")))
            return
        for raw in connection:
            script.got.append(json.loads(raw))
            answer = script.answers(script.got[-1])
            if answer is None:
                return
            connection.send(answer if isinstance(answer, str) else json.dumps(answer))

    def over_http(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        body = json.dumps({"action": script.schema}).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    with serve(session, "127.0.0.1", 0, process_request=over_http) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
