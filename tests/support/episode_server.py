"""A scripted model server for episodes: a ChatML template over characters, and a function that is the policy."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from schemas.records import LogprobsMode
from tentalis.inference.protocol import Completion, Float32, Generation, Int32, UnknownModel

BEGIN, END, LINE = 1, 2, 10
FIRST = 3
"""Characters below it would be special tokens."""
Policy = Callable[[str, int], str]
"""(the text of the conversation so far, number of its turns) -> the text of the next turn."""


def encoded(text: str) -> list[int]:
    return [max(FIRST, ord(character)) for character in text]


def decoded(tokens: Sequence[int]) -> str:
    special = {BEGIN: "<|im_start|>", END: "<|im_end|>"}
    return "".join(special.get(token) or chr(token) for token in tokens)


class EpisodeServer:
    """`failures` are raised by the next calls of `generate`. `appends` False: the template closes a conversation, so
    that nothing can be appended. `finish_reason` and `logprobs` are those of all completions. `renderings`: the model
    and the texts of each call of `render`. `greeting`: text with which the template begins every conversation."""

    def __init__(self, models: Sequence[str], policy: Policy) -> None:
        self.loaded = list(models)
        self.policy = policy
        self.failures: deque[Exception] = deque()
        self.prompts: list[list[int]] = []
        self.renderings: list[tuple[str, list[str]]] = []
        self.seeds: list[int] = []
        self.appends = True
        self.greeting = ""
        self.finish_reason = "stop"
        self.playing = self.most_playing = 0

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        self.playing += 1
        self.most_playing = max(self.most_playing, self.playing)
        await asyncio.sleep(0)
        self.playing -= 1
        if self.failures:
            raise self.failures.popleft()
        if model not in self.loaded:
            raise UnknownModel(404, f"no {model}")
        assert sampling["n"] == 1
        ids = [int(token) for token in prompt]
        self.prompts.append(ids)
        self.seeds.append(sampling["seed"])
        text = self.policy(decoded(ids), decoded(ids).count("<|im_start|>assistant") - 1)
        tokens = encoded(text) + ([END] if self.finish_reason == "stop" else [])
        values = np.full(len(tokens), -0.5, dtype=np.float32)
        done = Completion(text, np.array(tokens, dtype=np.int32), values, self.finish_reason)
        return Generation(model, np.array(ids, dtype=np.int32), [done], LogprobsMode.PROCESSED)

    async def render(
        self, model: str, messages: Any, add_generation_prompt: bool = True, template: Any = None
    ) -> Int32:
        self.renderings.append((model, [message["content"] for message in messages]))
        ids: list[int] = [*encoded(self.greeting)]
        for message in messages:
            ids += [BEGIN, *encoded(f"{message['role']}\n{message['content']}"), END, LINE]
        if add_generation_prompt:
            ids += [BEGIN, *encoded("assistant\n")]
        elif not self.appends:
            ids += encoded("the end")
        return np.array(ids, dtype=np.int32)

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32:
        raise NotImplementedError("nothing that is tested with this server scores")

    async def score_top(self, model: str, token_ids: Any, temperature: float = 1.0, k: int = 1) -> Any:
        raise NotImplementedError("nothing that is tested with this server scores")
