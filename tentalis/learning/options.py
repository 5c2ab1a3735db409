"""The options of `tentalis learn`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tentalis.learning.errors import LearnError
from tentalis.rewards.functions.scorer import MEMORY_MB, TIME_LIMIT_S

STDIN = "-"
PLAIN = "chat"
"""The environment of prompts that one completion answers."""
Loss = Literal["rl", "opd", "both"]


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of a run, from the command line or from Python.

    Attributes:
        source: file or folder of the prompts, or `-` for standard input.
        environment: of the tasks; one with episodes plays them, and may give the reward itself.
        environment_file: file of environments that has it; None: that of TENTALIS_ENVIRONMENT_FILE, if set.
        allow_unsandboxed: run the actions of the model without a wall, if this machine has none.
        rewards: reward functions, each PATH.py:NAME or MODULE:NAME.
        python_path: folders with modules that they are in or import.
        weights: of the functions, in their order; empty for equal ones.
        judge: URL of an OpenAI-compatible server whose model gives the rewards, instead of functions.
        judge_model: its name on the server; None: the first that the server lists.
        judge_key_env: name of the environment variable with the server's key.
        criterion: what a good answer is, for the judge; None: correct, helpful and short.
        hint: a function that gives hints, PATH.py:NAME or MODULE:NAME, or the name of a column; None for no hints.
        loss: rl trains on rewards, opd on hints, both on both; None: both with a hint, else rl.
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
        curriculum: choose the prompts by their solve rates, instead of each once and then all in a new order.
        seed: of the order of the prompts, the choice of the held-out ones and the training.
        compared: most held-out prompts that are answered before and after.
        new: begin a new run although an unfinished one has the same options.
        changes: trainer settings as the user wrote them.
        command: the command line or call that continues the run.
        emit: receives the result for programs, instead of the printed one.
    """

    source: str
    rewards: tuple[str, ...] = ()
    environment: str = PLAIN
    environment_file: str | None = None
    allow_unsandboxed: bool = False
    python_path: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    judge: str | None = None
    judge_model: str | None = None
    judge_key_env: str | None = None
    criterion: str | None = None
    hint: str | None = None
    loss: Loss | None = None
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
    curriculum: bool = False
    seed: int = 0
    compared: int = 64
    new: bool = False
    changes: tuple[str, ...] = ()
    command: str = "tentalis learn"
    emit: Callable[[Any], None] | None = None

    @property
    def trained(self) -> Loss:
        """The parts of the loss that train. Raises LearnError if hints are to train and there are none."""
        if self.loss in ("opd", "both") and self.hint is None:
            raise LearnError(f"--loss {self.loss} trains on hints: name a function or a column with --hint")
        return self.loss or ("rl" if self.hint is None else "both")
