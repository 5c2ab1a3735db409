"""What every command shares: exit codes, errors in words, settings, output. Imports nothing heavy."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tentalis.config import Settings

log = logging.getLogger(__name__)

# Under this name the local stack keeps its broker's port in ports.json.
BROKER_PORT = "broker"
OK, ERROR, USAGE, DRIFT, UNREACHABLE, TOO_MANY_DEAD, FORBIDDEN = 0, 1, 2, 3, 4, 5, 6
# Seconds in which a broker must answer before anything is begun that needs it.
PROBE_S = 5.0


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-server",
        help="Kafka brokers, host:port[,host:port]. Default: TENTALIS_BOOTSTRAP, else the running local stack.",
        show_default=False,
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", help="On stdout; logs go to stderr.")]


class CommandError(Exception):
    """An error for a person, with the exit code it ends the command with."""

    def __init__(self, message: str, code: int = ERROR) -> None:
        super().__init__(message)
        self.code = code


def explain(error: Exception) -> tuple[str, int]:
    """What to tell a person about an error, and the exit code."""
    if isinstance(error, CommandError):
        return str(error), error.code
    # Looked up, not imported: an error of a library that was never loaded cannot be at hand.
    kafka = sys.modules.get("confluent_kafka")
    if kafka is not None and isinstance(error, kafka.KafkaException):
        reason = error.args[0]
        away = {
            kafka.KafkaError._ALL_BROKERS_DOWN,
            kafka.KafkaError._TRANSPORT,
            kafka.KafkaError._TIMED_OUT,
            kafka.KafkaError._RESOLVE,
        }
        return f"Kafka: {reason.str()}", UNREACHABLE if reason.code() in away else ERROR
    refusal = sys.modules.get("tentalis.refusal")
    if refusal is not None and isinstance(error, refusal.Unreachable):
        return str(error), UNREACHABLE
    if refusal is not None and isinstance(error, refusal.Forbidden):
        return str(error), FORBIDDEN
    codec, registry = sys.modules.get("schemas.codec"), sys.modules.get("schemas.registry")
    if codec is not None and isinstance(error, codec.SchemasUnavailable):
        return str(error), UNREACHABLE
    if registry is not None and isinstance(error, registry.SchemaRefused):
        return str(error), DRIFT
    from tentalis.admin import Impossible
    from tentalis.config import BadSecurity, NoBroker
    from tentalis.dlq.limits import TooManyDead

    if isinstance(error, TooManyDead):
        return str(error), TOO_MANY_DEAD
    if isinstance(error, BadSecurity):
        return str(error), USAGE
    if isinstance(error, NoBroker):
        return str(error), UNREACHABLE
    from tentalis.service import UNMENDABLE, Unmendable

    if isinstance(error, Impossible):
        return str(error), DRIFT
    if isinstance(error, Unmendable):
        return str(error), UNMENDABLE
    if isinstance(error, ModuleNotFoundError):
        return f"{error}. The installation is not complete: `tentalis doctor` tells what is missing", ERROR
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        return f"{error.filename}: {error.strerror}", ERROR
    ours = type(error).__module__.partition(".")[0] in ("tentalis", "schemas", "streams", "trainer")
    text = str(error) or type(error).__name__
    return text if ours or isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}", ERROR


def configure_logging(default: str = "WARNING") -> None:
    """Logs to stderr, one line each; TENTALIS_LOG is the level. Processes of the stack default to INFO."""
    from tentalis import logs

    try:
        logs.configure(default)
    except logs.BadLevel as error:
        raise CommandError(str(error), USAGE) from error


def warn_of_misspelt_variables() -> None:
    """Says which TENTALIS_* variables are set and read by nobody."""
    from tentalis.environment import misspelt

    for complaint in misspelt(os.environ):
        log.warning("%s", complaint)


def local_bootstrap(home: Path) -> str | None:
    """The bootstrap server of the local stack that runs in a state directory, or None if none runs there."""
    if not (home / "status.json").is_file():
        return None
    from tentalis.local.state import StateDir

    status = StateDir(home).status()
    if status is None or not status["running"]:
        return None
    port = json.loads((home / "ports.json").read_text(encoding="utf-8")).get(BROKER_PORT)
    return f"127.0.0.1:{port}" if port else None


def resolve_settings(
    bootstrap: str | None = None, env: Mapping[str, str] = os.environ, *, join_stack: bool = True
) -> Settings:
    """The settings of a command: flag before environment before the running local stack of the state directory.

    `join_stack` False is for what starts a stack of its own. Raises CommandError.
    """
    from pydantic import ValidationError

    from tentalis.config import Settings

    try:
        settings = Settings.from_env(env)
    except ValidationError as error:
        raise CommandError(f"a TENTALIS_* variable has a wrong value: {error}", USAGE) from error
    named = bootstrap or settings.bootstrap
    if named or not join_stack:
        return settings.model_copy(update={"bootstrap": named})
    local = local_bootstrap(settings.home)
    if local is not None:
        settings.require_plaintext()
    return settings.model_copy(update={"bootstrap": local})


def connected_settings(bootstrap: str | None, timeout: float = PROBE_S) -> Settings:
    """As `resolve_settings`, after the broker has answered: commands fail in seconds, not after a minute of retries."""
    from tentalis.access import connect

    settings = resolve_settings(bootstrap)
    connect(settings, timeout)
    return settings


def settings_of_role(role: str, bootstrap: str | None) -> Settings:
    """The settings of a process of the stack, after the broker has answered and has said that this user may do with
    the topics what the role needs. Raises Unreachable, Forbidden."""
    from tentalis.access import check_role, connect

    settings = resolve_settings(bootstrap)
    check_role(connect(settings), settings, role)
    return settings


def before_a_stack(settings: Settings) -> None:
    """What a stack needs before anything is started: its Kafka, if one was named, and room. Raises CommandError."""
    from tentalis.local.disk import LEAST, space

    if settings.bootstrap is not None:
        from tentalis.access import connect
        from tentalis.refusal import Unreachable

        try:
            connect(settings, PROBE_S)
        except Unreachable as error:
            remedy = "Is TENTALIS_BOOTSTRAP right? Unset it to have a broker started here with the rest of the stack"
            raise CommandError(f"{error}. {remedy}", UNREACHABLE) from error
    if shortage := space(settings.home).shortage(LEAST):
        raise CommandError(
            f"{shortage}: the log, checkpoints and adapters need at least {LEAST // 2**20} MiB to begin with. "
            "Make room, or choose another state directory with TENTALIS_HOME"
        )


@contextmanager
def reached(bootstrap: str | None) -> Iterator[Settings]:
    """As `connected_settings`; where no Kafka is named and no stack runs, but one has run in the state directory, its
    broker is started on that log for as long as the command takes."""
    settings = resolve_settings(bootstrap)
    if settings.bootstrap is None:
        from tentalis.local.attach import broker_alone, has_log

        if has_log(settings):
            settings.require_plaintext()
            typer.echo(f"no stack runs: the broker of {settings.home} is started for this command", err=True)
            with broker_alone(settings) as alone:
                _wait_for_topics(alone)
                yield alone
            return
    yield connected_settings(bootstrap)


def _wait_for_topics(settings: Settings) -> None:
    """A broker that has just started knows its topics before it leads their partitions."""
    from tentalis.admin import KafkaAdmin, wait_visible

    admin = KafkaAdmin(settings)
    wait_visible(admin, admin.partitions())


def shortened(lines: Sequence[str], most: int = 5) -> list[str]:
    """The first of the lines for a person, and how many more there are: a topic full of garbage must not hide what was
    asked for. Programs get them all."""
    left = len(lines) - most
    return [*lines[:most], f"and {left} more (-o json lists them)"] if left > 0 else list(lines)


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout, flushed: a stream of these is JSON Lines."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
    return str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns aligned with blanks, heads in capitals, as kubectl and rpk do: easy to read and to cut."""
    cells = [
        [name.upper() for name in columns],
        *([_cell(value) for value in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        line = "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def show(output: Output, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Rows as a table or as one JSON array of objects (with all their fields, the table shows those named)."""
    if output is Output.JSON:
        print_json(rows)
    else:
        print_table(columns, [[row.get(name) for name in columns] for row in rows])
