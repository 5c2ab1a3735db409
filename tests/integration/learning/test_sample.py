"""Answers of a model server, scored by a reward function in its process."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.inference.client import OpenAIClient
from tentalis.learning.options import LearnOptions
from tentalis.learning.runs import Data, prepare_run
from tentalis.learning.sample import Asked, ScoredAnswer, base_model, scored_answers

REWARD = """
import time

def score(completions, kind, **columns):
    (kind,), (completion,) = kind, completions
    if kind == "raises":
        raise RuntimeError("no idea")
    if kind == "hangs":
        time.sleep(60)
    if kind == "large":
        return [7.0]
    if kind == "none":
        return [None]
    return [len(completion[0]["content"]) / 100]
"""


class Handler(BaseHTTPRequestHandler):
    """A base model and its adapter; a prompt of kind `refused` is too long."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "learn@v3", "parent": "tiny"}, {"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body["messages"][-1]["content"] == "refused":
            self._say(400, {"error": {"message": "too long"}})
            return
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": f"{body['model']} says {index}"},
                "logprobs": {"content": [{"token": "a", "logprob": -0.1}]},
                "token_ids": [1],
                "finish_reason": "stop",
            }
            for index in range(body["n"])
        ]
        self._say(200, {"model": body["model"], "prompt_token_ids": [5], "choices": choices})

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
def server() -> Iterator[str]:
    Handler.asked = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


def scenario_of(folder: Path, kinds: list[str]) -> PromptScenario:
    """Prepares a prompt for each kind, all of them held out, with the reward function above."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": kind, "kind": kind}) + "\n" for kind in kinds), encoding="utf-8")
    options = LearnOptions(
        str(source), (f"{folder / 'rewards.py'}:score",), held_out=str(source), max_tokens=32, reward_seconds=1.0
    )
    prepare_run(folder, options, Data(source, source), lambda text: None)
    return PromptScenario(folder / "prompts")


def test_every_answer_has_its_reward_or_the_reason_why_not(server: str, tmp_path: Path) -> None:
    kinds = ["good", "raises", "large", "none", "refused", "hangs"]
    scenario = scenario_of(tmp_path / "run", kinds)
    prompts = scenario.held_out(9)

    async def asked() -> list[list[ScoredAnswer]]:
        async with OpenAIClient(server) as client:
            assert await base_model(client) == "tiny"
            return await scored_answers(client, "learn@v3", scenario, prompts, Asked(2, 0.7, seed=5))

    groups = asyncio.run(asked())
    found = {prompt.messages[0][1]: group for prompt, group in zip(prompts, groups, strict=True)}
    assert {*found} == {*kinds} and all(len(group) == 2 for group in groups)
    assert [answer.reward for answer in found["good"]] == pytest.approx([0.15, 0.15])
    assert [answer.text for answer in found["good"]] == ["learn@v3 says 0", "learn@v3 says 1"]
    for kind, reason in {
        "raises": "rewards.py:7: score: RuntimeError: no idea",
        "large": "7, outside [-1, 1]",
        "none": "the reward function gave none",
        "refused": "the model server refused it: too long",
        "hangs": "took longer than 1 s",
    }.items():
        assert all(answer.reward is None and reason in answer.problem for answer in found[kind]), found[kind]
    assert "--reward-range LOW,HIGH" in found["large"][0].problem
    for body in Handler.asked:
        assert (body["model"], body["n"], body["temperature"], body["seed"]) == ("learn@v3", 2, 0.7, 5)
        assert body["max_completion_tokens"] == 32
