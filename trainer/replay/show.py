"""Output of `tentalis replay`: a table, or one object for programs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.service.stdout import data
from trainer.data.fetch import BadRollouts
from trainer.replay.job import RanksFailed
from trainer.replay.recording import CannotReplay
from trainer.replay.replay import TOLERANCE, ReplayStep, replay


def main(
    settings: Settings,
    run_id: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    into: Path | None = None,
    verify_only: bool = False,
    base_model: str | None = None,
    allow_missing: bool = False,
    emit: Callable[[Any], None] | None = None,
    ranks: int | None = None,
    changes: Mapping[str, str] | None = None,
    verifier: str | None = None,
    allow_unscored: bool = False,
) -> int:
    """`tentalis replay`: prints a table or passes the report to `emit`, and returns the exit code: 0 only if every step
    is equal (with `ranks`: within the tolerance; with `changes` or `verifier`: trained and compared). Raises
    ConfigError."""
    steps: list[ReplayStep] = []
    problems: list[str] = []
    unreadable: list[str] = []
    try:
        if changes or verifier is not None:
            from trainer.replay.compare_report import write_report
            from trainer.replay.counterfactual import counterfactual
            from trainer.replay.rescored_run import RewardSource

            comparison = counterfactual(
                run_id,
                settings,
                changes or {},
                rewards_from=None if verifier is None else RewardSource(verifier, allow_unscored),
                from_step=from_step or 0,
                to_step=to_step,
                into=into,
                base_model=base_model,
                unreadable=unreadable,
            )
            write_report(comparison, emit)
            return ExitCode.OK
        steps = replay(
            run_id,
            settings,
            from_step=from_step or 0,
            to_step=to_step,
            into=into,
            verify_only=verify_only,
            base_model=base_model,
            allow_missing=allow_missing,
            unreadable=unreadable,
            ranks=ranks,
        )
    except BadRollouts as error:
        problems = [str(problem) for problem in error.problems]
        if (
            not changes
            and verifier is None
            and all(problem.kind in ("missing", "forgotten") for problem in error.problems)
        ):
            print("--allow-missing trains without the rollouts that are missing or forgotten", file=sys.stderr)
    except (CannotReplay, RanksFailed) as error:
        problems = [str(error)]
    equal = not problems and all(step.equal is not False for step in steps)
    passed = not problems and all(step.meets_promise for step in steps)
    left_out = [reason for step in steps for reason in step.left_out]
    if emit is not None:
        emit(
            {
                "run_id": run_id,
                "equal": None if equal and any(step.equal is None for step in steps) else equal,
                "problems": problems,
                "left_out": left_out,
                "unreadable": unreadable,
                "steps": [asdict(step) for step in steps],
            }
        )
    else:
        _print_table(run_id, steps, problems, equal, verify_only)
    return ExitCode.OK if passed else ExitCode.ERROR


def _print_table(
    run_id: str, steps: Sequence[ReplayStep], problems: Sequence[str], equal: bool, verified: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    if problems:
        print(*problems, f"Run {run_id} cannot be replayed: nothing was trained.", sep="\n", file=sys.stderr)
        return
    console = Console(file=data(), highlight=False, soft_wrap=True)
    table = Table(title=f"Run {run_id}", title_justify="left")
    for column in ("step", "recorded sha256", "replayed sha256", "equal"):
        table.add_column(column, no_wrap=True)
    for step in steps:
        verdict = "not trained" if verified else "-" if step.equal is None else "yes" if step.equal else "NO"
        if step.distance is not None:
            verdict = f"{step.distance:.1e} apart"
        table.add_row(str(step.step), step.recorded_sha[:16], step.replayed_sha[:16], verdict)
    console.print(table)
    left_out = [reason for step in steps for reason in step.left_out]
    for reason in left_out:
        console.print(f"left out: {reason}", markup=False)
    outside = [step for step in steps if not step.meets_promise]
    uncompared = sum(step.equal is None and step.distance is None for step in steps)
    if verified:
        if not left_out:
            console.print(f"Every rollout of {len(steps)} steps is present and unaltered.")
        return
    if any(step.distance is not None for step in steps):
        console.print(
            f"Another number of ranks: {'NOT ' if outside else ''}within the tolerance of {TOLERANCE:g} of the "
            "recorded adapters' norms."
        )
    elif left_out:
        console.print("Trained without the missing rollouts: the steps marked - differ from those of the run.")
    elif not uncompared:
        console.print("Every step is equal." if equal else "Not every step is equal.")
    if uncompared and not left_out:
        console.print(
            f"{uncompared} of {len(steps)} steps, marked -, were not compared: their recorded adapters are not on "
            "this machine."
        )
