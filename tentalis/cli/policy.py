"""`tentalis policy`: which versions there are, what is served, and who decides otherwise."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import USAGE, Bootstrap, CommandError, print_json, print_table, reached
from tentalis.moments import written

if TYPE_CHECKING:
    from schemas.records import PolicyUpdate, Record
    from tentalis.config import Settings
    from tentalis.policies.view import View

app = typer.Typer(
    help="Versions of policies: look, promote, roll back, keep.", no_args_is_help=True, rich_markup_mode=None
)

TIMES = ("published", "at")
COLUMNS = ("version", "run", "step", "state", "guard", "served_by", "cannot_serve", "pinned")


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Form, typer.Option("--output", "-o", help="On stdout; logs go to stderr.")]
Version = Annotated[str, typer.Argument(help="policy@vN, or a policy for what of it should be served.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written and write nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stays on the log.")]


def _view(settings: Settings) -> View:
    from schemas import topics
    from tentalis.kafka import make_codec
    from tentalis.policies.view import View
    from tentalis.reading import Reader

    view = View()
    names = (topics.RUNS, topics.EVALS, topics.BATCHES, topics.POLICIES, topics.POLICY_ACKS)
    reader = Reader(settings, names, make_codec(settings))
    try:
        while not reader.caught_up:
            for _, record in reader.poll(0.1):
                view.apply(record)
    finally:
        reader.close()
    return view


def _print(output: Form, value: Any) -> None:
    if output is Form.JSON:
        print_json(value)
    else:
        import yaml

        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


@app.command("list", short_help="The versions of a policy, or of all.")
def list_versions(
    policy: Annotated[str | None, typer.Argument(help="Only of this policy.")] = None,
    bootstrap: Bootstrap = None,
    output: Output = Form.TABLE,
) -> None:
    """The versions, newest first: where they come from, whether they are served, and what the guard said."""
    from tentalis.kafka import now_ms

    with reached(bootstrap) as settings:
        view = _view(settings)
    if policy is not None and policy not in view.policies:
        raise CommandError(
            f"no version of {policy!r} was published; policies there: {', '.join(view.policies) or 'none'}"
        )
    rows = list(view.rows(policy, now_ms()))
    if output is not Form.TABLE:
        _print(output, rows)
        return
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    for name, why in {row["version"].partition("@")[0]: row["back_pressure"] for row in rows}.items():
        if why is not None:
            print(f"\n{name}: the trainer asks for no more rollouts: {why}")


@app.command(short_help="All that is known of a version.")
def show(version: Version, bootstrap: Bootstrap = None, output: Output = Form.TABLE) -> None:
    """All that is known of a version: its step, who decided what about it and why, refusals by servers, metrics."""
    with reached(bootstrap) as settings:
        view = _view(settings)
    details = view.details(view.named(version))
    if output is not Form.TABLE:
        _print(output, details)
        return
    print_table(("what", "value"), list(_lines(details)))


@app.command(short_help="What two versions differ in.")
def diff(one: Version, other: Version, bootstrap: Bootstrap = None, output: Output = Form.TABLE) -> None:
    """Steps between two versions, the settings their runs differ in, and their metrics side by side."""
    with reached(bootstrap) as settings:
        view = _view(settings)
    left, right = view.named(one), view.named(other)
    if left.policy != right.policy:
        raise CommandError(f"{left.name} and {right.name} are of two policies", USAGE)
    difference = view.difference(left, right)
    if output is not Form.TABLE:
        _print(output, difference)
        return
    steps = difference["steps_between"]
    print(f"one: {left.name}\nother: {right.name}")
    print(f"same weights: {'yes' if difference['same_weights'] else 'no'}")
    print(f"steps between: {'they have no common run' if steps is None else steps}\n")
    sides = (item for part in ("config", "metrics") for item in difference[part].items())
    rows = [(name, *map(_readable, values)) for name, values in sides]
    print_table(("what", "one", "other"), rows)


@app.command(short_help="Have a version served.")
def promote(
    version: Version,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Output = Form.TABLE,
) -> None:
    """Has a version served from now on. What was published before it stays unserved; training goes on from where it
    is, as far ahead of what is served as max_staleness lets it."""
    with reached(bootstrap) as settings:
        view = _view(settings)
        update = view.named(version)
        _present(update)
        _decide(settings, [_promotion(update, "manual", reason)], f"Serve {update.name}", dry_run, yes, output)


@app.command(short_help="Serve an earlier version, and train on from it.")
def rollback(
    version: Annotated[str, typer.Argument(help="policy@vN to go back to, or a policy: to what was served before.")],
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Output = Form.TABLE,
) -> None:
    """Serves an earlier version and has the trainer go on from it as a new run. What was trained since is
    abandoned, and nothing is trained twice."""
    from tentalis.guard import ROLLBACK

    with reached(bootstrap) as settings:
        view = _view(settings)
        update = view.named(version) if "@" in version else view.before(version)
        _present(update)
        _trainable(settings, view, update)
        question = f"Roll {update.policy} back to {update.name}, abandon what was trained since, and train on from it"
        _decide(settings, [_promotion(update, ROLLBACK, reason)], question, dry_run, yes, output)


@app.command(short_help="Keep a version from being pruned.")
def pin(
    version: Version,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Output = Form.TABLE,
) -> None:
    """Keeps the adapter and the checkpoint of a version on disk, however old it gets."""
    from schemas.records import Pin
    from tentalis.kafka import now_ms

    with reached(bootstrap) as settings:
        update = _view(settings).named(version)
        record = Pin(
            policy=update.policy,
            version=update.version,
            event_time=now_ms(),
            pinned=not off,
            by=f"cli/{getpass.getuser()}",
            reason=reason,
        )
        _decide(settings, [record], f"{'Unpin' if off else 'Pin'} {update.name}", dry_run, yes, output)


def _promotion(update: PolicyUpdate, mode: str, reason: str) -> Record:
    from tentalis.policies.guardian import promotion_of

    return promotion_of(update, mode, f"cli/{getpass.getuser()}", reason)


def _present(update: PolicyUpdate) -> None:
    """Raises CommandError for an adapter that nobody could load. One on another machine is its server's to check."""
    from tentalis.policies.sync import Refused, adapter_folder, check_weights

    try:
        folder = adapter_folder(update.location)
        if folder.parent.is_dir():
            check_weights(folder, update.sha256)
    except Refused as error:
        raise CommandError(f"{update.name} cannot be served: {error}") from error


def _trainable(settings: Settings, view: View, update: PolicyUpdate) -> None:
    """Raises CommandError for a version that the policy's trainer could not go on from, as far as can be seen here."""
    checkpoints = settings.home / "checkpoints" / update.run_id
    if checkpoints.is_dir() and not any(checkpoints.glob(f"{update.step:06d}-*")):
        raise CommandError(f"nothing can be trained on from {update.name}: {checkpoints} has no checkpoint of its step")
    newest = max((u for u in view.updates.values() if u.policy == update.policy), key=lambda u: u.version)
    if (update.base_sha256, update.rank) != (newest.base_sha256, newest.rank):
        raise CommandError(
            f"run {newest.run_id} cannot be trained on from {update.name}, which has another base model or LoRA rank. "
            f"To have it served all the same: tentalis policy promote {update.name}"
        )


def _decide(
    settings: Settings, records: Sequence[Record], question: str, dry_run: bool, yes: bool, output: Form
) -> None:
    from schemas import topics
    from tentalis.kafka import Publisher, make_codec

    if not dry_run and not yes:
        typer.confirm(f"{question}?", abort=True, err=True)
    if not dry_run:
        publisher = Publisher(settings, "tentalis/cli", make_codec(settings))
        for record in records:
            publisher.send(topics.POLICIES, record)
        publisher.flush()
    if output is Form.TABLE:
        typer.echo(f"{'would write' if dry_run else 'written'}: {question}", err=True)
    else:
        _print(output, [record.model_dump(mode="json") for record in records])


def _lines(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """For people: what lies deeper under its path, times and numbers as they are read."""
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            rows += _lines(inner, f"{prefix}{name}.")
        elif isinstance(inner, list):
            for number, item in enumerate(inner):
                rows += _lines(item, f"{prefix}{name}.{number}.")
        elif name in TIMES:
            rows.append((f"{prefix}{name}", written(inner)))
        else:
            rows.append((f"{prefix}{name}", _readable(inner)))
    return rows


def _readable(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
