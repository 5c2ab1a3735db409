"""`tentalis learn`: trains on the user's prompts with the user's reward function."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.environment_options import AllowUnsandboxed, EnvironmentFile
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import Format, OutputFormat, emitter
from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.stack_checks import check_before_start
from tentalis.cli.shared.trainer_changes import check_changes, configured
from tentalis.service.exit_codes import ExitCode

MOST_ANSWERS = 256


class LossChoice(StrEnum):
    RL = "rl"
    OPD = "opd"
    BOTH = "both"


Prompts = Annotated[
    str,
    typer.Argument(
        help="Prompts: a file (.jsonl, .json, .csv, .tsv, .parquet), a folder that `datasets` saved; or - for "
        "JSONL on standard input."
    ),
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="Reward function, with the parameters of TRL, verl or verifiers. Repeatable: rewards are added.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model: smollm2, qwen2.5-coder-0.5b or qwen2.5-coder-1.5b, a folder, a GGUF file, or a hub id. "
        "Default: smollm2.",
        show_default=False,
    ),
]
EnvironmentName = Annotated[
    str,
    typer.Option(
        "--environment",
        help="Environment of the tasks. One with episodes, or of a file of environments, gives the reward itself, and "
        "the other columns of the prompts are its data; unless --reward or --judge is given.",
    ),
]
HeldOut = Annotated[
    str | None,
    typer.Option(
        "--eval",
        metavar="PROMPTS",
        help="Held-out prompts for the comparison of before and after. Default: a tenth of the prompts.",
        show_default=False,
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Policy versions to train.")]
Group = Annotated[
    int, typer.Option("--group", min=2, max=MOST_ANSWERS, help="Answers per prompt, compared with each other.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Longest answer, or turn of an episode, in tokens.")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.01, help="Temperature of sampling.")]
Weight = Annotated[
    list[float] | None,
    typer.Option("--weight", help="Weight of a reward function, in the order of --reward. Default: 1 each."),
]
JudgeUrl = Annotated[
    str | None,
    typer.Option(
        "--judge",
        metavar="URL",
        help="OpenAI-compatible server whose model grades the answers, instead of --reward.",
        show_default=False,
    ),
]
JudgeModel = Annotated[
    str | None,
    typer.Option(
        "--judge-model", help="Model of the judge. Default: the first that the server lists.", show_default=False
    ),
]
JudgeKey = Annotated[
    str | None,
    typer.Option(
        "--judge-key-env", metavar="VARIABLE", help="Variable with the API key of the judge.", show_default=False
    ),
]
Criterion = Annotated[
    str | None,
    typer.Option(
        "--criterion",
        metavar="TEXT|@FILE",
        help="What a good answer is, for the judge. Default: correct, helpful and short.",
        show_default=False,
    ),
]
Hint = Annotated[
    str | None,
    typer.Option(
        "--hint",
        metavar="FILE.py:FUNCTION",
        help="Hints: a function with the parameters of a reward function that returns a text or None for each answer, "
        "or the name of a column. Trains towards the model's answers under the hint.",
        show_default=False,
    ),
]
LossName = Annotated[
    LossChoice | None,
    typer.Option(
        "--loss",
        help="Train on rewards (rl), on hints (opd), or on both. Default: both with --hint, else rl.",
        show_default=False,
    ),
]
RewardRange = Annotated[
    str | None,
    typer.Option(
        "--reward-range",
        metavar="LOW,HIGH",
        help="Lowest and highest reward (of the sum, if several), mapped to -1 and 1. Default: -1 to 1.",
        show_default=False,
    ),
]
RewardSeconds = Annotated[
    float, typer.Option("--reward-seconds", min=0.1, max=100.0, help="Time limit of one call of a reward function.")
]
RewardMemory = Annotated[
    int, typer.Option("--reward-memory", min=128, help="Memory limit of the reward functions' process, in MiB.")
]
Column = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME=prompt", help="Another name of a column of the prompts. Repeatable."),
]
ByCurriculum = Annotated[
    bool,
    typer.Option(
        "--curriculum",
        help="Ask rarely what is always or never solved: choose the prompts by their solve rates. Default: each prompt "
        "once, then all in a new order.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the order of prompts, the held-out part and the training.")
]
Compared = Annotated[
    int, typer.Option("--eval-prompts", min=1, help="Most held-out prompts that are answered before and after.")
]
Check = Annotated[bool, typer.Option("--check", help="Sample 16 answers, show them with their rewards, and stop.")]
New = Annotated[bool, typer.Option("--new", help="Begin a new run although one with the same options is unfinished.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SETTING=VALUE", help="Trainer setting, such as optimizer.lr=1e-4. Repeatable."),
]


def learn(
    prompts: Prompts,
    reward: Reward = None,
    judge: JudgeUrl = None,
    judge_model: JudgeModel = None,
    judge_key_env: JudgeKey = None,
    criterion: Criterion = None,
    environment: EnvironmentName = "chat",
    environment_file: EnvironmentFile = None,
    allow_unsandboxed: AllowUnsandboxed = False,
    model: Model = None,
    held_out: HeldOut = None,
    steps: Steps = 100,
    group: Group = 8,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    weight: Weight = None,
    hint: Hint = None,
    loss: LossName = None,
    reward_range: RewardRange = None,
    reward_seconds: RewardSeconds = 10.0,
    reward_memory: RewardMemory = 2048,
    column: Column = None,
    curriculum: ByCurriculum = False,
    seed: Seed = 0,
    compared: Compared = 64,
    check: Check = False,
    new: New = False,
    changes: Changes = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Trains a model on your prompts with your reward function, and compares before with after on held-out prompts.

    Ctrl-C stops everything; the same command continues the run.
    """
    from tentalis.service.packages import require

    require("`tentalis learn`", "local", "serve", "train")
    from tentalis.learning.check import check as check_reward
    from tentalis.learning.options import LearnOptions
    from tentalis.learning.play import learn as learn_run

    options = LearnOptions(
        source=prompts,
        rewards=tuple(reward or ()),
        environment=environment,
        environment_file=None if environment_file is None else str(environment_file),
        allow_unsandboxed=allow_unsandboxed,
        judge=judge,
        judge_model=judge_model,
        judge_key_env=judge_key_env,
        criterion=criterion_of(criterion),
        weights=parse_weights(weight or [], reward or []),
        hint=hint,
        loss=None if loss is None else loss.value,
        reward_range=parse_range(reward_range),
        reward_seconds=reward_seconds,
        reward_memory_mb=reward_memory,
        model=model,
        held_out=held_out,
        steps=steps,
        group=group,
        max_tokens=max_tokens,
        temperature=temperature,
        columns=parse_columns(column or []),
        curriculum=curriculum,
        seed=seed,
        compared=compared,
        new=new,
        changes=tuple(changes or ()),
        command=shlex.join(["tentalis", *sys.argv[1:]]),
        emit=emitter(output),
    )
    settings = resolve_settings(join_stack=False)
    # The check starts the model server alone, which needs no Kafka.
    check_before_start(settings, own_log=True, kafka=not check)
    check_changes(options.changes)
    code = check_reward(options, settings) if check else learn_run(options, settings, configured)
    raise typer.Exit(code)


def parse_weights(weights: list[float], rewards: list[str]) -> tuple[float, ...]:
    """Returns the weights. Raises CommandError if there is another number of them than of functions."""
    if weights and len(weights) != len(rewards):
        raise CommandError(
            f"--weight is given {len(weights)} times and --reward {len(rewards)} times: give one weight per function",
            ExitCode.USAGE,
        )
    return tuple(weights)


def criterion_of(given: str | None) -> str | None:
    """Returns the criterion, of a file if it begins with @. Raises CommandError."""
    if given is None or not given.startswith("@"):
        return given
    try:
        text = Path(given[1:]).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CommandError(f"--criterion {given}: {error}", ExitCode.USAGE) from error
    if not text:
        raise CommandError(f"--criterion {given}: the file is empty", ExitCode.USAGE)
    return text


def parse_range(given: str | None) -> tuple[float, float] | None:
    """Returns the two numbers of LOW,HIGH. Raises CommandError."""
    if given is None:
        return None
    try:
        low, high = (float(each) for each in given.split(","))
    except ValueError as error:
        raise CommandError(f"--reward-range {given}: give two numbers, such as 0,10", ExitCode.USAGE) from error
    if not low < high:
        raise CommandError(f"--reward-range {given}: the first number must be less than the second", ExitCode.USAGE)
    return low, high


def parse_columns(given: list[str]) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of NAME=NEW. Raises CommandError."""
    pairs = tuple((old, new) for old, _, new in (each.partition("=") for each in given))
    bad = [each for each, (old, new) in zip(given, pairs, strict=True) if not old or not new]
    if bad:
        raise CommandError(f"--column {bad[0]}: give NAME=NEW, such as question=prompt", ExitCode.USAGE)
    for which in (0, 1):
        names = [pair[which] for pair in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise CommandError(f"--column names {twice[0]} twice: name each column once", ExitCode.USAGE)
    return pairs
