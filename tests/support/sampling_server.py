"""An HTTP server that samples from a known distribution and answers as vLLM does, without a model.

The log-probs of the next token depend on the last token only. As a program it takes the arguments of `vllm serve`.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import ROOT
from tests.support.http_server import serving

VOCABULARY = 40
PROMPT_IDS = [3, 1, 4, 1, 5]
_ROWS = np.random.default_rng(7).normal(0.0, 2.0, (VOCABULARY, VOCABULARY))
_LOGPROBS = _ROWS - np.logaddexp.reduce(_ROWS, axis=1, keepdims=True)


@dataclass
class SamplingServer:
    """`mode`: the log-probs that it gives, `processed_logprobs` or `raw_logprobs`; another value is neither of the two.
    `tokenizes`, `scores`: it has /tokenize, and gives log-probs of prompts. `models`: what it lists, the base first.
    `names`: its answers name the model. `away`: it answers 503. `broken`: so many requests for samples get 500.
    `asked`: the number of requests for samples."""

    mode: str = "processed_logprobs"
    tokenizes: bool = True
    scores: bool = True
    models: tuple[str, ...] = ("base",)
    names: bool = True
    away: bool = False
    broken: int = 0
    asked: int = field(default=0)

    def __call__(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> tuple[int, str, bytes]:
        status, body = (503, {"error": {"message": "it starts"}}) if self.away else self._answer(path, content)
        return status, "application/json", json.dumps(body).encode()

    def _answer(self, path: str, content: bytes) -> tuple[int, Any]:
        body = json.loads(content) if content else {}
        match path:
            case "/health":
                return 200, {}
            case "/v1/models":
                base, *adapters = self.models
                card = {"owned_by": "vllm", "max_model_len": 512}
                cards: list[dict[str, Any]] = [card | {"id": base, "parent": None}]
                return 200, {"data": cards + [card | {"id": name, "parent": base} for name in adapters]}
            case "/tokenize" if self.tokenizes:
                return 200, {"tokens": PROMPT_IDS}
            case "/v1/completions":
                return self._completions(body)
            case "/v1/chat/completions":
                return 200, self._chat(body)
            case _:
                return 404, {"detail": "Not Found"}

    def _completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        if self.broken:
            self.broken -= 1
            return 500, {"error": {"message": "out of memory"}}
        if body["max_tokens"]:
            choices = [
                {"index": at, "text": "x", "finish_reason": "length", "token_ids": ids, "prompt_token_ids": prompt}
                | {"logprobs": {"token_logprobs": logprobs}}
                for at, (ids, logprobs) in enumerate(self._samples(prompt[-1], body))
            ]
        elif self.scores:
            entries = [None, *(self._entry(*pair, body["prompt_logprobs"]) for pair in pairwise(prompt))]
            choices = [{"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": entries}]
        else:
            return 400, {"error": {"message": "prompt_logprobs is not supported"}}
        return 200, ({"model": body["model"]} if self.names else {}) | {"choices": choices}

    def _chat(self, body: dict[str, Any]) -> Any:
        [(ids, logprobs)] = self._samples(PROMPT_IDS[-1], body | {"max_tokens": 3, "n": 1})
        content = [{"token": "x", "logprob": logprob, "top_logprobs": list[Any]()} for logprob in logprobs]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "xxx"},
            "finish_reason": "stop",
        }
        choice |= {"logprobs": {"content": content}, "token_ids": ids}
        return {"model": body["model"], "choices": [choice], "prompt_token_ids": PROMPT_IDS}

    def _samples(self, last: int, body: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        self.asked += 1
        draw = np.random.default_rng(body.get("seed"))
        return [self._sample(last, body, draw) for _ in range(body.get("n") or 1)]

    def _sample(self, last: int, body: dict[str, Any], draw: np.random.Generator) -> tuple[list[int], list[float]]:
        ids, given = [], []
        for _ in range(body["max_tokens"]):
            raw = _LOGPROBS[last]
            scaled = raw / body["temperature"]
            if top := body.get("top_k"):
                scaled = np.where(raw >= np.sort(raw)[-top], scaled, -np.inf)
            processed = scaled - np.logaddexp.reduce(scaled)
            last = int(draw.choice(VOCABULARY, p=np.exp(processed)))
            modes = {"processed_logprobs": processed, "raw_logprobs": raw}
            ids.append(last)
            given.append(float(modes[self.mode][last]) if self.mode in modes else -9.0)
        return ids, given

    @staticmethod
    def _entry(last: int, token: int, top: int) -> dict[str, dict[str, Any]]:
        """The log-probs of the likeliest tokens after `last`, and of `token`."""
        order = [int(each) for each in np.argsort(-_LOGPROBS[last])]
        named = {*order[:top], token}
        return {str(each): {"logprob": float(_LOGPROBS[last][each]), "rank": order.index(each) + 1} for each in named}


@contextmanager
def sampling(server: SamplingServer) -> Iterator[str]:
    """The server on a free port; yields its URL."""
    with serving(server) as url:
        yield url


def program(folder: Path, **server: Any) -> Path:
    """Writes an executable that takes the arguments of `vllm serve` and is a SamplingServer with these fields; without
    `mode`, in the mode that its arguments name. `exits_after_s`: it ends with code 3 after so long."""
    path = folder / "vllm"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.sampling_server import main\nmain(sys.argv[1:], {server!r})\n"
    )
    path.chmod(0o755)
    return path


def main(arguments: list[str], server: dict[str, Any]) -> None:
    """Serves until the process is ended."""
    options = dict(pairwise(arguments))
    after = server.pop("exits_after_s", None)
    if after == 0:
        sys.exit(3)
    if after is not None:
        threading.Timer(after, os._exit, [3]).start()
    made = SamplingServer(
        **({"mode": options["--logprobs-mode"], "models": (options["--served-model-name"],)} | server)
    )
    with serving(made, port=int(options["--port"])):
        threading.Event().wait()
