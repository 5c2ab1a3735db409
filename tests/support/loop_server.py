"""An inference server in memory, for tests only: the protocol and the adapter endpoints, with failures on demand."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas.records import LogprobsMode
from tentalis.inference.protocol import Completion, Float32, Generation, Int32, RequestRefused, UnknownModel


class LoopServer:
    """`failures` are raised by the next calls of `generate`, one each; `gate`, if set, is awaited by every call."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.loaded: dict[str, str] = dict.fromkeys(models, "")
        self.failures: deque[Exception] = deque()
        self.calls: list[dict[str, Any]] = []
        self.called = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.away: Exception | None = None
        self.refuse_load: str | None = None
        self.missing = 0
        self.card: dict[str, Any] = {}
        self.sha256: str | None = None
        self.logprob = -0.5
        self.scores: Sequence[float] = (float("nan"), -1.0, -2.0)

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        self.calls.append({"model": model, "prompt": prompt, **sampling})
        self.called.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.popleft()
        if self.away is not None:
            raise self.away
        if model not in self.loaded:
            raise UnknownModel(404, f"no {model}")
        ids = [np.array([10 + i, 11, 2], dtype=np.int32) for i in range(sampling["n"] - self.missing)]
        values = np.full(3, self.logprob, dtype=np.float32)
        completions = [Completion(f"Answer {i} is this one.", each, values, "stop") for i, each in enumerate(ids)]
        return Generation(model, np.array([1, 2, 3], dtype=np.int32), completions, LogprobsMode.PROCESSED)

    async def render(self, model: str, messages: Any, add_generation_prompt: bool = True) -> Int32:
        raise NotImplementedError("nothing that is tested with this server renders")

    async def models(self) -> list[dict[str, Any]]:
        if self.away is not None:
            raise self.away
        return [{"id": "base"} | self.card, *({"id": name, "parent": "base"} for name in self.loaded)]

    async def load_adapter(self, name: str, path: str, in_place: bool = False, sha256: str | None = None) -> None:
        if self.refuse_load is not None:
            raise RequestRefused(400, self.refuse_load)
        self.loaded[name] = path
        self.sha256 = sha256

    async def unload_adapter(self, name: str) -> None:
        if name not in self.loaded:
            raise UnknownModel(404, f"no {name}")
        del self.loaded[name]

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32:
        if model not in self.loaded:
            raise UnknownModel(404, f"no {model}")
        return np.asarray(self.scores, dtype=np.float32)
