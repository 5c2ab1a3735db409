"""What `tentalis replay` prints: a table for people or one JSON object."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tentalis.cli.common import shortened
from tentalis.config import Settings
from trainer.fetch import BadRollouts
from trainer.recording import CannotReplay
from trainer.replay import TOLERANCE, ReplayStep, replay
from trainer.replay_job import RanksFailed


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
    as_json: bool = False,
    ranks: int | None = None,
    changes: Mapping[str, str] | None = None,
) -> int:
    """`tentalis replay`: prints one table or one JSON object to stdout and returns the exit code, 0 only if all is
    equal (with `ranks`: within the tolerance; with `changes`: trained and compared). Raises ConfigError."""
    steps: list[ReplayStep] = []
    problems: list[str] = []
    unreadable: list[str] = []
    try:
        if changes:
            from trainer.counterfactual import counterfactual
            from trainer.side_by_side import present

            comparison = counterfactual(
                run_id,
                settings,
                changes,
                from_step=from_step or 0,
                to_step=to_step,
                into=into,
                base_model=base_model,
                unreadable=unreadable,
            )
            present(comparison, as_json)
            return 0
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
        if not changes and all(problem.kind in ("missing", "forgotten") for problem in error.problems):
            print("--allow-missing trains without the rollouts that are missing or forgotten", file=sys.stderr)
    except (CannotReplay, RanksFailed) as error:
        problems = [str(error)]
    equal = not problems and all(step.equal is not False for step in steps)
    holds = not problems and all(step.holds for step in steps)
    left_out = [reason for step in steps for reason in step.left_out]
    if as_json:
        json.dump(
            {
                "run_id": run_id,
                "equal": None if equal and any(step.equal is None for step in steps) else equal,
                "problems": problems,
                "left_out": left_out,
                "unreadable": unreadable,
                "steps": [asdict(step) for step in steps],
            },
            sys.stdout,
        )
        sys.stdout.write("\n")
    else:
        for line in shortened([f"passed over, no record: {each}" for each in unreadable]):
            print(line)
        _print_table(run_id, steps, problems, equal, verify_only)
    return 0 if holds else 1


def _print_table(
    run_id: str, steps: Sequence[ReplayStep], problems: Sequence[str], equal: bool, verified: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(problem, markup=False)
    if problems:
        console.print(f"Run {run_id} cannot be replayed: nothing was trained.")
        return
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
    far = [step for step in steps if not step.holds]
    unseen = sum(step.equal is None and step.distance is None for step in steps)
    if verified:
        if not left_out:
            console.print(f"Every rollout of {len(steps)} steps is there and unaltered.")
        return
    if any(step.distance is not None for step in steps):
        console.print(
            f"Another number of ranks: {'NOT ' if far else ''}within the tolerance of {TOLERANCE:g} of the recorded "
            "adapters' norms."
        )
    elif left_out:
        console.print("Trained without what is not there: the steps marked - are not those of the run.")
    elif not unseen:
        console.print("Every step is equal." if equal else "Not every step is equal.")
    if unseen and not left_out:
        console.print(
            f"{unseen} of {len(steps)} steps, marked -, were compared with nothing: their recorded adapters are not on "
            "this machine."
        )
