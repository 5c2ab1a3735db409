"""The engine's jobs and their results."""

from collections.abc import Callable
from dataclasses import dataclass

from tentalis.inference.prefix_store import Prefix
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens
from tentalis.inference.whole_model import ServedVersion


class EngineError(Exception):
    """A request failed inside the engine."""


class RequestFailed(EngineError):
    """The request's own parameters made it fail: repeating it will not help."""


class EngineStopped(EngineError):
    """The engine rejects the request or will not finish it: it is stopping, or its queue is full."""


@dataclass
class GeneratedChunk:
    """New tokens of one sample. `text` is set for requests that stream or have stop strings; `top` holds, per token,
    the most likely tokens with their log-probs; the sample's last chunk has a `finish_reason`."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None
    text: str | None
    finish_reason: str | None
    stop_reason: str | int | None


ResultSink = Callable[[GeneratedChunk | ScoredTokens | EngineError], None]
"""Called from the engine's thread; must not block."""


@dataclass(eq=False)
class GenerateJob:
    """`n` samples of one prompt. A streaming job gets a chunk per token, others one per sample."""

    prompt: list[int]
    params: SamplingParams
    n: int
    adapter: ServedVersion | None
    stream: bool
    sink: ResultSink
    cancelled: bool = False
    # Samples that have a row or are finished. Only the engine writes this and the next.
    started: int = 0
    # What is computed of a long prompt.
    prefix: Prefix | None = None


@dataclass(eq=False)
class ScoreJob:
    """A request for the log-prob of every token of one sequence, given the tokens before it."""

    token_ids: list[int]
    temperature: float
    top: int
    adapter: ServedVersion | None
    sink: ResultSink
    cancelled: bool = False
