"""The token-exact inference protocol: what workers and teachers need from any server, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
"""A chat message as OpenAI writes it: {"role": "user", "content": "..."}."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class InferenceError(Exception):
    """A call to an inference server failed."""


class ServerUnavailable(InferenceError):
    """Nobody answers, or the server says it cannot now (503): the same call may succeed later."""


class RequestRefused(InferenceError):
    """The server understood the call and refused it, or failed on it: repeating it as it is will not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"The inference server answered {status}: {message}")
        self.status = status
        self.message = message


class UnknownModel(RequestRefused):
    """The server serves no model or adapter of that name (404)."""


class NotTokenExact(RequestRefused):
    """The server answered, but not with a token id or log-prob for each token (502): the same call gets no better
    answer."""

    def __init__(self, message: str) -> None:
        super().__init__(502, message)


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    `token_ids` int32 [n] is what was sampled, the end-of-turn token included; `logprobs` float32 [n] the log-prob of
    each under the distribution it was drawn from (temperature, top-k and top-p applied); `finish_reason` is "stop" or
    "length". Example: Completion("Paris.", [36102, 30, 2], [-0.1, -0.7, -0.01], "stop"); 2 is the end-of-turn token.
    """

    text: str
    token_ids: Int32
    logprobs: Float32
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """n completions of one prompt. `model` is the model or adapter (`policy@vN`) that really sampled them."""

    model: str
    prompt_token_ids: Int32
    completions: list[Completion]


class Inference(Protocol):
    """Any server that can sample and score token by token. Every method raises InferenceError."""

    async def generate(
        self,
        model: str,
        prompt: Sequence[Message] | Sequence[int],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Sample `n` completions of chat messages or of token ids. top_k 0 and top_p 1 mean the whole distribution."""
        ...

    async def score(self, model: str, token_ids: Sequence[int], temperature: float = 1.0) -> Float32:
        """log p(token | the tokens before it), float32 [len(token_ids)]; index 0, which has no prefix, is NaN."""
        ...

    async def score_top(
        self, model: str, token_ids: Sequence[int], temperature: float = 1.0, k: int = 1
    ) -> tuple[Float32, Int32, Float32]:
        """As `score`, and the k likeliest tokens at each place, likeliest first, int32 [n, k], with their log-probs,
        float32 [n, k]; at index 0 they are -1 and NaN."""
        ...

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        """The token ids that the server's chat template makes of `messages`, int32 [n]. `template`: what else of a
        request it reads, by the fields' names (tools, chat_template_kwargs)."""
        ...
