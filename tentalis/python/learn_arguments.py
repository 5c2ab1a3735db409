"""The arguments of `tentalis.learn`, turned into the options of a run."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args

from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions, Loss
from tentalis.python.given_dataset import Dataset, path_of
from tentalis.python.shipped_functions import FunctionPlace, place_of

Reward = str | Callable[..., Any]
"""A function, or its place as the command takes it: `rewards.py:score`."""
Rewards = Reward | Sequence[Reward] | None
"""One function or several; None with a judge."""
CALL = "tentalis.learn(...)"
LEAST = {"steps": 1, "group": 2, "max_tokens": 1, "eval_prompts": 1, "seed": 0}
SAME = {
    name: name
    for name in (
        *("model", "steps", "group", "max_tokens", "temperature", "reward_range", "reward_seconds", "reward_memory_mb"),
        *("seed", "new", "loss", "judge", "judge_model", "judge_key_env", "criterion", "curriculum"),
        *("environment", "allow_unsandboxed"),
    )
} | {"eval_prompts": "compared"}
"""The options that arguments become unchanged, by argument."""


class LearnArguments(TypedDict, total=False):
    """The arguments by name; see `tentalis.learn`. One that is None has its default."""

    environment: str | None
    environment_file: str | Path | None
    allow_unsandboxed: bool | None
    model: str | None
    eval: Dataset | None
    steps: int | None
    group: int | None
    max_tokens: int | None
    temperature: float | None
    weights: Sequence[float] | None
    judge: str | None
    judge_model: str | None
    judge_key_env: str | None
    criterion: str | None
    hint: Reward | None
    loss: Loss | None
    reward_range: tuple[float, float] | None
    reward_seconds: float | None
    reward_memory_mb: int | None
    columns: Mapping[str, str] | None
    curriculum: bool | None
    seed: int | None
    eval_prompts: int | None
    settings: Mapping[str, Any] | None
    home: str | Path | None
    new: bool | None
    progress: bool | None


def checked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments without those that are None.

    Raises TypeError for an unknown name, LearnError for a number that is too small and an unknown loss.
    """
    for name in arguments:
        if name not in LearnArguments.__annotations__:
            near = difflib.get_close_matches(name, LearnArguments.__annotations__, n=1, cutoff=0.5)
            raise TypeError(f"learn() has no argument {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    given = {name: value for name, value in arguments.items() if value is not None}
    if given.get("loss", "rl") not in get_args(Loss):
        raise LearnError(f"loss={given['loss']!r}: give one of {', '.join(get_args(Loss))}")
    for name, least in LEAST.items():
        if given.get(name, least) < least:
            raise LearnError(f"{name}={given[name]}: give at least {least}")
    return given


def datasets_folder(home: Path) -> Path:
    """Returns the folder of the rows that calls give."""
    return home / "datasets"


def options_of(
    dataset: Dataset,
    reward: Rewards,
    arguments: Mapping[str, Any],
    home: Path,
    emit: Callable[[Any], None],
) -> LearnOptions:
    """Returns the options of a call whose arguments are checked. Rows, and functions without a file, are written below
    `home`.

    Raises LearnError.
    """
    given = () if reward is None else reward
    rewards = [given] if isinstance(given, str) or callable(given) else list(given)
    weights = tuple(arguments.get("weights", ()))
    if weights and len(weights) != len(rewards):
        raise LearnError(f"{len(rewards)} reward functions with {len(weights)} weights: give one weight for each")
    places = [_place(each, home / "functions") for each in rewards]
    given_hint = arguments.get("hint")
    hint = None if given_hint is None else _place(given_hint, home / "functions")
    folders = [folder for place in (*places, hint) if place is not None for folder in place.folders]
    held_out = arguments.get("eval")
    return LearnOptions(
        source=path_of(dataset, datasets_folder(home)),
        rewards=tuple(place.target for place in places),
        python_path=tuple(dict.fromkeys(map(str, folders))),
        weights=weights,
        environment_file=str(arguments["environment_file"]) if "environment_file" in arguments else None,
        hint=None if hint is None else hint.target,
        held_out=None if held_out is None else path_of(held_out, datasets_folder(home)),
        columns=tuple(arguments.get("columns", {}).items()),
        changes=tuple(f"{name}={_written(value)}" for name, value in arguments.get("settings", {}).items()),
        command=CALL,
        emit=emit,
        **{SAME[name]: value for name, value in arguments.items() if name in SAME},
    )


def _place(reward: Reward, folder: Path) -> FunctionPlace:
    return FunctionPlace(reward) if isinstance(reward, str) else place_of(reward, folder)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
