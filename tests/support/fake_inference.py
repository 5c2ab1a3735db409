"""An inference server for tests: deterministic tokens and log-probs, a record of what it was asked."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tentalis.inference.protocol import Float32, Generation, Int32, Message
from tentalis.opd import HINT_TAG


class FakeInference:
    """`fails(model)` gives the exception to raise, if any. `prompt`: tokens of every prompt without a hint. `rendered`:
    those with one, and `templates` what else the template was given; `plain`: those without. `busy_most`: most calls of
    `score` at the same time."""

    def __init__(
        self,
        fails: Callable[[str], Exception | None] = lambda model: None,
        yields: int = 0,
        prompt: Sequence[int] = (1, 2, 3),
    ) -> None:
        self.fails = fails
        self.prompt = prompt
        self.rendered: list[list[Message]] = []
        self.templates: list[dict[str, Any]] = []
        self.plain: list[tuple[list[Message], dict[str, Any]]] = []
        self.scored: list[tuple[str, list[int], float]] = []
        self.busy = self.busy_most = self.asked_for_model = 0
        self._yields = yields

    @staticmethod
    def tokens_of(messages: Sequence[Message]) -> list[int]:
        return [1000 + ord(char) for message in messages for char in message["content"]]

    @staticmethod
    def logprob(position: int, token: int) -> float:
        return float(np.float32(-0.001 * position - 0.1 * token))

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        assert add_generation_prompt
        if not any(HINT_TAG in str(message["content"]) for message in messages):
            self.plain.append(([dict(message) for message in messages], dict(template or {})))
            return np.asarray(self.prompt, dtype=np.int32)
        self.templates.append(dict(template or {}))
        self.rendered.append([dict(message) for message in messages])
        return np.asarray(self.tokens_of(messages), dtype=np.int32)

    async def score(self, model: str, token_ids: Sequence[int], temperature: float = 1.0) -> Float32:
        self.busy += 1
        self.busy_most = max(self.busy_most, self.busy)
        try:
            for _ in range(self._yields):
                await asyncio.sleep(0)
            error = self.fails(model)
            if error is not None:
                raise error
            self.scored.append((model, list(token_ids), temperature))
            scores = [self.logprob(position, token) for position, token in enumerate(token_ids)]
            return np.asarray([np.nan, *scores[1:]], dtype=np.float32)
        finally:
            self.busy -= 1

    async def score_top(
        self, model: str, token_ids: Sequence[int], temperature: float = 1.0, k: int = 1
    ) -> tuple[Float32, Int32, Float32]:
        """The likeliest tokens at a place are its number and those after it, a nat apart."""
        scores = await self.score(model, token_ids, temperature)
        ids = np.arange(len(token_ids), dtype=np.int32)[:, None] + np.arange(k, dtype=np.int32)
        logprobs = np.broadcast_to(-1.0 - np.arange(k, dtype=np.float32), ids.shape)
        return scores, np.where(ids < 0, -1, ids), logprobs.astype(np.float32)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        raise AssertionError("a teacher never samples")
