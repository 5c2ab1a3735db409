"""A fake model server with the calls that hinting and experience make. It answers at once."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tentalis.opd import HINT_TAG
from tentalis.opd.lesson import END, START

BASE = "tiny"
VOCABULARY = 1000
"""Token ids from this one on have no text."""
LESSON = f"They wanted it short. {START}\nDo: answer in one line.\nDon't: use lists.\n{END} \\boxed{{1}}"


class _Model(BaseHTTPRequestHandler):
    """Returns -token/100 as the log-prob of a token, and always the same lesson as a judge."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": f"{BASE}@v1", "parent": BASE}, {"id": BASE}]})

    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == BASE
        if self.path == "/tokenize":
            text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
            plain = "messages" in body and HINT_TAG not in text
            tokens = [ord(char) + self.server.shift for char in text]
            self._answer({"tokens": list(self.server.prompt) if plain else tokens})
        elif self.path == "/detokenize":
            text = "".join(chr(token - self.server.shift) for token in body["tokens"] if token < VOCABULARY)
            self._answer({"prompt": text})
        elif self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": LESSON}
            self._answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        else:
            scores = [None] + [{str(token): {"logprob": -token / 100}} for token in body["prompt"][1:]]
            self._answer({"model": BASE, "choices": [{"index": 0, "prompt_logprobs": scores}]})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


class _Server(ThreadingHTTPServer):
    """A server with a large backlog: each call is a connection, and clients would only retry refused ones."""

    request_queue_size = 256
    daemon_threads = True
    prompt: Sequence[int] = ()
    shift = 0


@contextmanager
def model_server(port: int = 0, prompt: Sequence[int] = (1, 2, 3), shift: int = 0) -> Iterator[str]:
    """Serves until the block ends; yields the URL. `port`: 0 for a free one. `prompt`: the tokens of every conversation
    without a hint, as in the fixtures. `shift`: the token of the character n is n + shift."""
    server = _Server(("127.0.0.1", port), _Model)
    server.prompt, server.shift = prompt, shift
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def hinters_file(folder: Path, server: str) -> Path:
    """The configuration file for `serve experience --hinters`, with this server for the lessons."""
    path = folder / "hinters.yaml"
    path.write_text(f"lesson: {{endpoint: {{url: {server}, model: {BASE}}}}}\n")
    return path
