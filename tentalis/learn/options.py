"""The options of `tentalis learn`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tentalis.rewards.functions.scorer import MEMORY_MB, TIME_LIMIT_S

STDIN = "-"


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of the command line.

    Attributes:
        source: file or folder of the prompts, or `-` for standard input.
        rewards: reward functions, each PATH.py:NAME.
        weights: of the functions, in their order; empty for equal ones.
        reward_range: lowest and highest reward of the functions; None: rewards are in [-1, 1].
        reward_seconds: time limit of one call of a function.
        reward_memory_mb: memory limit of the functions' process.
        model: name or place of the model; None for the default one.
        held_out: file or folder of held-out prompts; None: a tenth of the prompts.
        steps: policy versions to train.
        group: answers per prompt.
        max_tokens: longest answer, in tokens.
        temperature: of sampling.
        columns: new names of columns, by their name in the source.
        seed: of the order of the prompts, the choice of the held-out ones and the training.
        compared: most held-out prompts that are answered before and after.
        new: begin a new run although an unfinished one has the same options.
        changes: trainer settings as the user wrote them.
        command: the command line, which continues the run.
        emit: receives the result for programs, instead of the printed one.
    """

    source: str
    rewards: tuple[str, ...]
    weights: tuple[float, ...] = ()
    reward_range: tuple[float, float] | None = None
    reward_seconds: float = TIME_LIMIT_S
    reward_memory_mb: int = MEMORY_MB
    model: str | None = None
    held_out: str | None = None
    steps: int = 100
    group: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    columns: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    compared: int = 64
    new: bool = False
    changes: tuple[str, ...] = ()
    command: str = "tentalis learn"
    emit: Callable[[Any], None] | None = None
