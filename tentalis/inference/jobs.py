"""What the engine is asked for, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

from tentalis.inference.lora import Adapter
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens


class EngineError(Exception):
    """A request failed inside the engine."""


class EngineStopped(EngineError):
    """The engine does not take, or will not finish, the request: it is stopping or its queue is full."""


@dataclass
class Chunk:
    """New tokens of one sample. `text` is set for requests that stream or have stop strings; `top` holds, per token,
    the likeliest tokens with their log-probs; the sample's last chunk has a `finish_reason`."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None
    text: str | None
    finish_reason: str | None
    stop_reason: str | int | None


Sink = Callable[[Chunk | ScoredTokens | EngineError], None]
"""Called from the engine's thread; must not block."""


@dataclass(eq=False)
class GenerateJob:
    """`n` samples of one prompt. A streaming job gets a chunk per token, others one per sample."""

    prompt: list[int]
    params: SamplingParams
    n: int
    adapter: Adapter | None
    stream: bool
    sink: Sink
    cancelled: bool = False
    # Samples that have a row or are finished; the engine's own.
    started: int = 0


@dataclass(eq=False)
class ScoreJob:
    """The log-prob of every token of one sequence given those before it."""

    token_ids: list[int]
    temperature: float
    top: int
    adapter: Adapter | None
    sink: Sink
    cancelled: bool = False
