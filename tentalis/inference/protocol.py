"""The inference protocol: the calls that workers and teachers need from any server.

A server that gives token ids and log-probs is token-exact: its samples can be trained on. One that does not can answer
tasks (`generate`), but not teach.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.records import LogprobsMode

Message = dict[str, Any]
"""A chat message as OpenAI writes it: {"role": "user", "content": "..."}."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class InferenceError(Exception):
    """A call to an inference server failed."""


class ServerUnavailable(InferenceError):
    """The server does not answer now, or answers 408, 429, 502, 503 or 504: the same call may succeed later."""


class RequestRefused(InferenceError):
    """The server refused the call or failed on it. If `by_content`, repeating the same call will not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"The inference server answered {status}: {message}")
        self.status = status
        self.message = message

    @property
    def by_content(self) -> bool:
        """True if the request's content is the reason (400, 413, 422). Every other status is a fault of the server or
        of its configuration: a wrong key, an unknown model, an internal error."""
        return self.status in (400, 413, 422)


class UnknownModel(RequestRefused):
    """The server serves no model or adapter of that name (404)."""


class NotTokenExact(RequestRefused):
    """The server's answer lacks the token id or log-prob of some token (502): repeating the same call will not
    help."""

    def __init__(self, message: str) -> None:
        super().__init__(502, message)


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    `token_ids` int32 [n] are the sampled tokens, the end-of-turn token included; `logprobs` float32 [n] the log-prob of
    each, under the distribution that the generation's `logprobs_mode` names. Both are None if the server does not give
    them. `finish_reason` is "stop" or "length". Example: Completion("Paris.", [36102, 30, 2], [-0.1, -0.7, -0.01],
    "stop"); 2 is the end-of-turn token.
    """

    text: str
    token_ids: Int32 | None
    logprobs: Float32 | None
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """n completions of one prompt. `model` is the model or adapter (`policy@vN`) that sampled them.

    `prompt_token_ids` is None if the server does not give them; the completions then have no token ids either.
    `logprobs_mode`: processed, of the distribution that was sampled from (temperature, top-k and top-p applied); raw,
    of the model's own; none, if there are no log-probs; unknown, if the server does not declare which.
    """

    model: str
    prompt_token_ids: Int32 | None
    completions: list[Completion]
    logprobs_mode: LogprobsMode


class Inference(Protocol):
    """Any server that can sample, and score token by token. Every method raises InferenceError."""

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
        """Like `score`, and the k most likely tokens at each position, most likely first, int32 [n, k], with their
        log-probs, float32 [n, k]; at index 0 they are -1 and NaN."""
        ...

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        """The token ids of `messages` under the server's chat template, int32 [n]. `template`: the other request fields
        that the template reads, by name (tools, chat_template_kwargs)."""
        ...
