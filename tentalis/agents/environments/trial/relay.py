"""A server on loopback between a program and a model server, in the place of a gateway. It records nothing."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import httpx

_ANSWER_S = 600.0
"""Seconds for one answer of the model server."""
_LOOK_S = 0.02
"""Seconds in which the server notices its end."""
_DATA = "data: "


class ProgramRelay:
    """Passes the calls of a program on to a model server, shows them, and refuses those beyond `max_turns`.

    `model` answers whatever model the program names. Answers that the program streams come in one piece. `changed`:
    returns what is sent for the body of a call; None: the body.
    """

    def __init__(
        self,
        server: str,
        model: str,
        max_turns: int,
        show: Callable[[str], None],
        changed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.answers: list[str] = []
        self.statuses: list[int] = []
        """Of the calls that were passed on, in the order of their ends."""
        self.failure = ""
        """What was wrong with the last call that the model server did not answer with 200."""
        self._server, self._model = server.rstrip("/").removesuffix("/v1"), model
        self._max_turns, self._show, self._changed = max_turns, show, changed or (lambda body: body)
        self._turns = 0
        self._lock = threading.Lock()
        self._http = httpx.Client(timeout=_ANSWER_S)
        relay = self

        class Handler(BaseHTTPRequestHandler):
            """Answers one request."""

            def do_GET(self) -> None:
                self._send(*relay.passed("GET", self.path, None))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._send(*relay.passed("POST", self.path, body))

            def _send(self, status: int, kind: str, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(ConnectionError):  # the program has ended
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Logs nothing: the calls are shown."""

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(_LOOK_S,), daemon=True)

    @property
    def url(self) -> str:
        """The address, without /v1."""
        return f"http://127.0.0.1:{self._listener.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._http.close()

    def passed(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Returns the status, content type and content of the answer to a request."""
        if body is None:
            return self._asked(method, path, None)
        try:
            sent = json.loads(body)
        except ValueError:
            return _refused(400, "the body is not JSON")
        if not isinstance(sent, dict):
            return _refused(400, "the body is not a JSON object")
        with self._lock:
            turn = self._turns = self._turns + 1
        if turn > self._max_turns:
            return _refused(403, f"the {self._max_turns} turns of this episode are used up: end the program")
        passed_on = {**self._changed(sent), "model": self._model}
        status, kind, content = self._asked(method, path, json.dumps(passed_on).encode())
        text = answer_text(content) if status == 200 else content.decode(errors="replace")
        with self._lock:
            self.statuses.append(status)
            if status == 200:
                self.answers.append(text)
            else:
                self.failure = f"the model server answered {method} {path} with {status}: {text}"
            self._show(f"{_asked_text(sent)}[turn {turn}]\n{text}\n")
        return status, kind, content

    def _asked(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        try:
            answer = self._http.request(
                method, f"{self._server}{path}", content=body, headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            return _refused(502, f"{self._server} does not answer: {error or type(error).__name__}")
        return answer.status_code, answer.headers.get("content-type", "application/json"), answer.content


def _refused(status: int, message: str) -> tuple[int, str, bytes]:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return status, "application/json", json.dumps({"error": error}).encode()


def _asked_text(body: Mapping[str, Any]) -> str:
    """Returns the last message of a call as text; nothing for another protocol than that of chat completions."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return ""
    last = messages[-1]
    return f"[{last.get('role')}]\n{_text(last.get('content'))}\n\n"


def answer_text(content: bytes) -> str:
    """Returns the text and the tool calls of an answer of chat completions, also of a streamed one; the whole content
    of another answer."""
    text = content.decode(errors="replace")
    whole = [text] if not text.startswith(_DATA) else [line.removeprefix(_DATA) for line in text.splitlines()]
    parts: list[str] = []
    for each in whole:
        try:
            message = _message(json.loads(each))
        except ValueError:  # such as the end of a stream
            continue
        parts += [_text(message.get("content")), *(json.dumps(call) for call in message.get("tool_calls") or ())]
    return "".join(parts) or text


def _message(answer: Any) -> Mapping[str, Any]:
    """Returns the message of an answer, or a part of it; an empty one if there is none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    found = (choice.get("message") or choice.get("delta")) if isinstance(choice, dict) else None
    return found if isinstance(found, dict) else {}


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
