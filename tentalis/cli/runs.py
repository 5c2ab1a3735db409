"""`tentalis runs`: lists, shows and compares training runs, and deletes what is stored of one, here and in
TENTALIS_STORE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun
from tentalis.cli.shared.output import (
    Format,
    OutputFormat,
    detail_rows,
    print_data,
    print_table,
    print_text,
    readable,
    show,
)
from tentalis.cli.shared.settings import reached
from tentalis.text.timestamps import written

if TYPE_CHECKING:
    from tentalis.ops.runs.core import RunHistory, RunsView
    from tentalis.ops.runs.deletion import DeletionRow
    from tentalis.service.settings import Settings

app = typer.Typer(
    help="Training runs: list, show, compare, delete.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LISTED = ("run", "policy", "parent", "steps", "versions", "rollouts", "dropped", "reward", "began")
STEPS = ("step", "version", "rollouts", "reward", "rl loss", "opd loss", "at", "sha256")
DELETED = ("what", "version", "bytes", "action", "path")
SHORT_SHA = 16

Run = Annotated[str, typer.Argument(help="Id of a run.")]


@app.command("list", short_help="List the runs on the log.")
def list_runs(
    policy: Annotated[str | None, typer.Argument(help="Only runs of this policy.")] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists the runs, newest first: policy, parent, steps, versions, rollouts that were trained and dropped, last
    reward."""
    from tentalis.ops.runs.process import read_runs

    with reached(bootstrap) as settings:
        view = read_runs(settings)
    rows = [view.row(run) for run in view.runs if policy in (None, run.policy)]
    if output is not OutputFormat.TABLE:
        print_data(output, rows)
        return
    show(output, LISTED, [row | {"reward": readable(row["reward"]), "began": written(row["began"])} for row in rows])


@app.command("show", short_help="Show the steps, settings and versions of a run.")
def show_run(run: Run, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Shows everything that the log says about a run: settings, libraries, steps with their digests, drops, versions,
    and the runs that continue it."""
    from tentalis.ops.runs.process import read_runs

    with reached(bootstrap) as settings:
        view = read_runs(settings)
    details = view.details(view.find(run))
    if output is not OutputFormat.TABLE:
        print_data(output, details)
        return
    steps = details.pop("steps_trained")
    print_table(("what", "value"), detail_rows(details))
    print_text()
    print_table(STEPS, [_step_row(step) for step in steps])


def _step_row(step: dict[str, Any]) -> list[Any]:
    metrics = (readable(step["metrics"].get(name)) for name in ("reward_mean", "rl_loss", "opd_loss"))
    return [step["step"], step["version"], step["rollouts"], *metrics, written(step["at"]), step["sha256"][:SHORT_SHA]]


@app.command(short_help="Compare two runs.")
def compare(one: Run, other: Run, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Compares two runs: settings and libraries that differ, the ends of their curves, the rollouts that they share,
    and the adapters' digests step by step.

    Equal digests mean the same weights. To train a run again and compare: `tentalis replay`; under another setting:
    `tentalis replay --set`, which also measures the distance between the adapters.
    """
    from tentalis.ops.runs.process import read_runs

    with reached(bootstrap) as settings:
        view = read_runs(settings)
    found = view.compare(view.find(one), view.find(other))
    if output is not OutputFormat.TABLE:
        print_data(output, found)
        return
    facts = {name: found[name] for name in ("runs", "policies", "parents", "steps")}
    rows = [
        (name, *map(readable, pair))
        for part in (facts, found["settings"], found["environment"])
        for name, pair in part.items()
    ]
    curves = [
        (f"{metric} {end}", *map(readable, pair))
        for metric, ends in found["curves"].items()
        for end, pair in ends.items()
    ]
    print_table(("what", "one", "other"), [*rows, *curves, ("rollouts of this run only", *found["rollouts"]["only"])])
    digests, rollouts = found["digests"], found["rollouts"]
    print_text(f"\nrollouts of both: {rollouts['both']}, of those with other content: {rollouts['other_content']}")
    first = digests["first_difference"]
    differ = "" if first is None else f"; they differ from step {first} on"
    print_text(f"steps with the same adapter: {digests['equal']} of {digests['compared']} that both have{differ}")


@app.command(short_help="Delete what is stored of a run, here and in TENTALIS_STORE.")
def delete(
    run: Run,
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Deletes checkpoints, adapters and reports of a run in TENTALIS_HOME, and in TENTALIS_STORE if it is set.
    Without --yes it only shows the plan.

    Records on the log stay: they number the versions and are what a replay reads. Versions that may be served again
    stay, and so does the checkpoint from which a trainer or another run continues. Refused while the run is trained.
    """
    from tentalis.ops.runs.deletion import DeletionRefused, consequences
    from tentalis.ops.runs.process import check_inactive, read_runs
    from tentalis.ops.runs.process import delete as carry_out

    with reached(bootstrap) as settings:
        view = read_runs(settings)
        found = view.find(run)
        try:
            check_inactive(settings, view, found)
        except DeletionRefused as error:
            raise CommandError(str(error)) from error
        rows = _deletion(settings, view, found)
    lines = consequences(rows, run)
    if output is OutputFormat.TABLE:
        print_table(DELETED, [[row[name] for name in DELETED] for row in map(_deletion_row, rows)])
        for line in lines:
            typer.echo(f"consequence: {line}", err=True)
    else:
        print_data(output, {"run": run, "folders": [_deletion_row(row) for row in rows], "consequences": lines})
    if dry_run or not yes:
        typer.echo("dry run: nothing was deleted; --yes deletes these folders", err=True)
        return
    typer.echo(f"deleted: {carry_out(rows)} bytes of {run}; its records on the log stay", err=True)


def _deletion(settings: Settings, view: RunsView, run: RunHistory) -> list[DeletionRow]:
    """Returns the plan. The trainer's own rule decides which versions may be served again."""
    from tentalis.ops.runs.deletion import plan_deletion
    from tentalis.ops.runs.process import is_newest, stored_parts
    from trainer.run.retention import versions_to_keep

    parts = stored_parts(settings, view, run)
    needed: set[int] = set()
    if not view.is_counterfactual(run):
        present = {part.version for part in parts if part.version is not None}
        promoted = [promotion.version for promotion in view.versions.promotions.get(run.policy, [])]
        pinned = {u.version for u in view.updates(run) if view.versions.pinned(u.name)}
        pinned |= view.versions.assignments.versions(run.policy)
        weights = {u.version: u.sha256 for u in view.versions.updates.values() if u.policy == run.policy}
        staleness = int(run.settings.get("max_staleness", 0))
        needed = versions_to_keep(present, max(weights, default=0), staleness, promoted, pinned, weights)
    resumable = is_newest(view, run) and not view.is_counterfactual(run)
    return plan_deletion(parts, needed, view.children(run), resumable)


def _deletion_row(row: DeletionRow) -> dict[str, Any]:
    part = row.part
    return {
        "what": part.kind,
        "version": None if part.version is None else f"v{part.version}",
        "bytes": part.bytes,
        "action": f"keep: {row.keep}" if row.keep else "delete",
        "path": str(part.place),
    }
