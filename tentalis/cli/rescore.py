"""`tentalis rescore`: scores the recorded answers of a run again."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.environment_options import AllowUnsandboxed, Tasks
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes, ask
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode


def rescore(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help="ENVIRONMENT/NAME@VERSION, such as math/math or swe/tests@2.")
    ],
    tasks: Tasks = None,
    scorers: Annotated[
        Path | None, typer.Option("--scorers", help="File of scorers, for those of your own.", show_default=False)
    ] = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Answers scored at the same time.")] = 4,
    allow_unsandboxed: AllowUnsandboxed = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes new scores of a run's answers beside the old ones. They are counted as late, and no run trains on them.

    `tentalis replay RUN --verifier LABEL` trains a counterfactual run with them as the rewards.

    With --dry-run the answers are scored and nothing is written. The same command again writes no score twice.
    """
    if scorers is not None:
        from tentalis.cli.serve.scorer_file import register_scorers

        register_scorers(scorers)
    from tentalis.agents.environments import EnvironmentOptions
    from tentalis.agents.environments.terminal_task import BadTasks
    from tentalis.agents.sandbox import WallMissing, choose_wall
    from tentalis.ops.rescore import process
    from tentalis.ops.rescore.core import BadScorerLabel, NothingToScore, ScorerLabel
    from tentalis.ops.rescore.graders import grader_of
    from tentalis.rewards.verdict import ScorerAway

    options = EnvironmentOptions(cache(partial(choose_wall, allow_unsandboxed=allow_unsandboxed)), tasks=tasks)
    try:
        grader = grader_of(ScorerLabel.parse(verifier), options)
    except (BadScorerLabel, BadTasks, WallMissing) as error:
        raise CommandError(f"--verifier: {error}", ExitCode.USAGE) from error
    with reached(bootstrap) as settings:
        try:
            work = process.find_work(settings, run, grader.label)
            if work.to_score and not dry_run and not yes:
                question = f"Write scores of {grader.label} for {len(work.to_score)} answers of run {run}?"
                ask(question)
            rows = [
                *work.left_out,
                *process.rescore(settings, work, grader, write=not dry_run, parallel=parallel),
            ]
        except (NothingToScore, ScorerAway) as error:
            raise CommandError(str(error), ExitCode.ERROR) from error
    left_out = [row for row in rows if row.left_out is not None]
    scored = [row for row in rows if row.left_out is None]
    changed = [row for row in scored if row.new != row.old]
    counts = {"scored": len(scored), "changed": len(changed), "already": work.already, "left_out": len(left_out)}
    if output is not OutputFormat.TABLE:
        fields = ("task_id", "sample_index", "result_id", "old", "new", "left_out")
        answers = [{name: getattr(row, name) for name in fields} for row in rows]
        print_data(output, {"run": run, "scorer": str(grader.label), "dry_run": dry_run, **counts, "answers": answers})
        return
    print_table(tuple(counts), [tuple(counts.values())])
    if changed:
        print_text("")
        print_table(("changed", "old", "new"), [(f"{r.task_id}/{r.sample_index}", r.old, r.new) for r in changed])
    if left_out:
        print_text("")
        print_table(("left out", "reason"), [(f"{r.task_id}/{r.sample_index}", r.left_out) for r in left_out])
    if dry_run:
        print_text("\ndry run: nothing was written")
