"""`tentalis policy`: lists, compares, promotes, rolls back, pins, assigns and exports versions of policies."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.policy_assign import assign, unassign
from tentalis.cli.policy_compare import compare
from tentalis.cli.policy_export import export
from tentalis.cli.shared.decide import decide
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes
from tentalis.cli.shared.output import (
    Format,
    OutputFormat,
    detail_rows,
    print_data,
    print_table,
    print_text,
    readable,
)
from tentalis.cli.shared.policy_version import EarlierVersion, PolicyVersion
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.records import PolicyUpdate, Record
    from tentalis.policies.view import PolicyView
    from tentalis.service.settings import Settings

app = typer.Typer(
    help="Policy versions: list, compare, promote, roll back, pin, assign, export.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command(short_help="Let a version answer the tasks of a worker, an environment, or a share of all.")(assign)
app.command(short_help="End an assignment.")(unassign)
app.command(short_help="Compare the rewards of two versions.")(compare)
app.command(short_help="Write a version to files for other servers.")(export)

COLUMNS = ("version", "run", "step", "state", "guard", "served_by", "cannot_serve", "pinned")
ASSIGNMENT_COLUMNS = ("scope", "subject", "tasks_of", "answered_by", "percent", "held_by", "by")


Reason = Annotated[str, typer.Option("--reason", help="Reason, stored on the log.")]


def _view(settings: Settings) -> PolicyView:
    from tentalis.policies.view_reader import read_policies

    return read_policies(settings)


@app.command("list", short_help="List the versions of one or all policies.")
def list_versions(
    policy: Annotated[str | None, typer.Argument(help="Only this policy.")] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists the versions, newest first: their origin, whether they are served, and the verdict of the guard."""
    from tentalis.text.timestamps import now_ms

    with reached(bootstrap) as settings:
        view = _view(settings)
    if policy is not None and policy not in view.policies:
        raise CommandError(
            f"no version of {policy!r} was published; published policies: {', '.join(view.policies) or 'none'}"
        )
    rows = list(view.rows(policy, now_ms()))
    if output is not OutputFormat.TABLE:
        print_data(output, rows)
        return
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    for name, why in {row["version"].partition("@")[0]: row["back_pressure"] for row in rows}.items():
        if why is not None:
            print_text(f"\n{name}: the trainer applies backpressure: {why}")
    _print_assignments([row for row in view.assignment_rows() if policy in (None, row["tasks_of"])])


def _print_assignments(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the assignments in force, and what keeps a server from holding one."""
    if not rows:
        return
    print_text("\nassignments:")
    print_table(ASSIGNMENT_COLUMNS, [[row[name] for name in ASSIGNMENT_COLUMNS] for row in rows])
    for row in rows:
        for server, why in row["cannot_hold"].items():
            print_text(
                f"{row['answered_by']}: the server {server} cannot hold it, so the served version answers there: {why}"
            )
        if row["held_by"] is None and not row["cannot_hold"]:
            print_text(
                f"{row['answered_by']}: no server has it yet, so the served version answers; `tentalis serve policies` "
                "of each server loads it"
            )


@app.command(short_help="Show everything known about a version.")
def show(version: PolicyVersion, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Shows everything known about a version: its step, decisions and reasons, refusals by servers, metrics."""
    with reached(bootstrap) as settings:
        view = _view(settings)
    details = view.details(view.find(version))
    if output is not OutputFormat.TABLE:
        print_data(output, details)
        return
    print_table(("what", "value"), detail_rows(details))


@app.command(short_help="Compare two versions.")
def diff(
    one: PolicyVersion, other: PolicyVersion, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE
) -> None:
    """Compares two versions: steps between them, settings in which their runs differ, metrics."""
    with reached(bootstrap) as settings:
        view = _view(settings)
    left, right = view.find(one), view.find(other)
    if left.policy != right.policy:
        raise CommandError(f"{left.name} and {right.name} belong to different policies", ExitCode.USAGE)
    difference = view.difference(left, right)
    if output is not OutputFormat.TABLE:
        print_data(output, difference)
        return
    steps = difference["steps_between"]
    print_text(f"one: {left.name}\nother: {right.name}")
    print_text(f"same weights: {'yes' if difference['same_weights'] else 'no'}")
    print_text(f"steps between: {'no common run' if steps is None else steps}\n")
    sides = (item for part in ("config", "metrics") for item in difference[part].items())
    rows = [(name, *map(readable, values)) for name, values in sides]
    print_table(("what", "one", "other"), rows)


@app.command(short_help="Serve a version.")
def promote(
    version: PolicyVersion,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Serves a version from now on. Other versions published so far are not served; training continues from its newest
    step, at most max_staleness steps ahead of the served version."""
    with reached(bootstrap) as settings:
        view = _view(settings)
        update = view.find(version)
        _present(update)
        decide(settings, [_promotion(update, "manual", reason)], f"Serve {update.name}", dry_run, yes, output)


@app.command(short_help="Serve an earlier version, continue training from it.")
def rollback(
    version: EarlierVersion,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Serves an earlier version and continues training from it as a new run. Later steps are abandoned, and no rollout
    is trained twice."""
    from tentalis.policies.guard import ROLLBACK

    with reached(bootstrap) as settings:
        view = _view(settings)
        update = view.find(version) if "@" in version else view.before(version)
        _present(update)
        _trainable(settings, view, update)
        question = f"Roll {update.policy} back to {update.name}, abandon later steps, and continue training from it"
        decide(settings, [_promotion(update, ROLLBACK, reason)], question, dry_run, yes, output)


@app.command(short_help="Protect a version from pruning.")
def pin(
    version: PolicyVersion,
    off: Annotated[bool, typer.Option("--off", help="Remove the pin.")] = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Keeps the adapter and the checkpoint of a version on disk, regardless of its age."""
    from schemas.records import Pin
    from tentalis.text.timestamps import now_ms

    with reached(bootstrap) as settings:
        update = _view(settings).find(version)
        record = Pin(
            policy=update.policy,
            version=update.version,
            event_time=now_ms(),
            pinned=not off,
            by=f"cli/{getpass.getuser()}",
            reason=reason,
        )
        decide(settings, [record], f"{'Unpin' if off else 'Pin'} {update.name}", dry_run, yes, output)


def _promotion(update: PolicyUpdate, mode: str, reason: str) -> Record:
    from tentalis.policies.guardian import promotion_of

    return promotion_of(update, mode, f"cli/{getpass.getuser()}", reason)


def _present(update: PolicyUpdate) -> None:
    """Raises CommandError if an adapter cannot be loaded. Adapters on other machines are checked by their servers."""
    from tentalis.policies.replica import AdapterRejected, adapter_place, check_weights, weights_name
    from tentalis.storage.file_set import read_manifest

    try:
        place = adapter_place(update.location)
        if place.folder is None:
            manifest, file = read_manifest(place), weights_name(update)
            if manifest is None or file not in manifest.files or manifest.files[file].sha256 != update.sha256:
                raise AdapterRejected(f"{place} does not hold the weights with sha256 {update.sha256}")
        elif place.folder.parent.is_dir():
            check_weights(place.folder, update)
    except AdapterRejected as error:
        raise CommandError(f"{update.name} cannot be served: {error}") from error


def _trainable(settings: Settings, view: PolicyView, update: PolicyUpdate) -> None:
    """Raises CommandError if the object store has no checkpoint of the version's step, or this machine has checkpoints
    of its run, but none of its step."""
    from tentalis.storage.file_set import list_sets
    from tentalis.storage.places import checkpoints_location

    place = checkpoints_location(settings, update.run_id)
    names: list[str] = []
    if place.folder is None:
        names = list(list_sets(place).sets)
    elif place.folder.is_dir():
        names = [path.name for path in place.folder.iterdir()]
    elsewhere = place.folder is not None and not place.folder.is_dir()
    if not elsewhere and not any(name.startswith(f"{update.step:06d}-") for name in names):
        raise CommandError(f"training cannot continue from {update.name}: {place} has no checkpoint of its step")
    newest = max((u for u in view.updates.values() if u.policy == update.policy), key=lambda u: u.version)
    if (update.base_sha256, update.rank) != (newest.base_sha256, newest.rank):
        raise CommandError(
            f"run {newest.run_id} cannot continue from {update.name}, which has another base model or LoRA rank. "
            f"To serve it anyway: tentalis policy promote {update.name}"
        )
