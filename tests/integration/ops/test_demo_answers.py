"""The questions that are shown at the end, asked over HTTP."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tentalis.agents.scenarios import make_scenario
from tentalis.demo.answers import compare_answers
from tentalis.inference.protocol import ServerUnavailable


class Handler(BaseHTTPRequestHandler):
    """Two models; the base model refuses the second question."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "tiny"}, {"id": "assistant@v3", "parent": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        question = body["messages"][-1]["content"]
        if body["model"] == "tiny" and question == make_scenario("assistant").showcase[1][0].content:
            self._say(400, {"error": {"message": "too long"}})
            return
        logprobs = {"content": [{"token": "a", "logprob": -0.1}]}
        message = {"role": "assistant", "content": f" {body['model']} says. "}
        choice = {"index": 0, "message": message, "logprobs": logprobs, "token_ids": [1], "finish_reason": "stop"}
        self._say(200, {"model": body["model"], "prompt_token_ids": [5], "choices": [choice]})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.asked = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def test_both_models_are_asked_greedily_and_a_refusal_stands_where_its_answer_would(
    server: ThreadingHTTPServer,
) -> None:
    scenario = make_scenario("assistant")
    said = compare_answers(f"http://127.0.0.1:{server.server_port}", "assistant@v3", scenario, lambda: None)
    assert [each.question for each in said] == [prompt[0].content for prompt in scenario.showcase]
    assert (said[0].base, said[0].newest) == ("tiny says.", "assistant@v3 says.")
    assert (said[1].base, said[1].newest) == ("(no answer: too long)", "assistant@v3 says.")
    assert all(body["temperature"] == 0.0 and body["max_completion_tokens"] == 64 for body in Handler.asked)
    assert len(Handler.asked) == 6


def test_a_server_that_is_not_there_says_so() -> None:
    with pytest.raises(ServerUnavailable):
        compare_answers("http://127.0.0.1:9", "assistant@v3", make_scenario("assistant"), lambda: None)


def test_who_waits_for_answers_can_still_be_interrupted() -> None:
    class Enough(Exception):
        pass

    def check() -> None:
        raise Enough

    with socket.socket() as silent:  # takes the connection, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Enough):
            compare_answers(
                f"http://127.0.0.1:{silent.getsockname()[1]}", "assistant@v3", make_scenario("assistant"), check
            )
