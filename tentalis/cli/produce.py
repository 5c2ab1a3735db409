"""`tentalis produce`: writes records to a topic, as Avro on the log from JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.records import Record
    from tentalis.kafka.producer import Publisher

TopicName = Annotated[str, typer.Argument(help="Name of the topic.")]


def produce(
    topic: TopicName,
    file: Annotated[Path, typer.Option("--file", help="JSON Lines file; - is standard input.")] = Path("-"),
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes of the file unchanged, as one record.")] = False,
    key: Annotated[str | None, typer.Option("--key", help="Key of a raw record.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate every line and write nothing.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes records from JSON Lines.

    A line is the record, or {"type": NAME, "value": RECORD} as `consume -o json` prints it. Records are validated as
    their readers validate them; key and headers come from the record. Invalid lines are reported and skipped; the exit
    code is then 1.
    """
    from tentalis.kafka.acls import Operation
    from tentalis.kafka.codec import make_codec
    from tentalis.kafka.preflight import check, connect
    from tentalis.kafka.producer import Publisher, checked_size

    if key is not None and not raw:
        raise CommandError("--key requires --raw: the key of a record comes from its fields", ExitCode.USAGE)
    if str(file) != "-" and (file.is_dir() or not file.exists()):
        raise CommandError(f"--file {file}: there is no such file", ExitCode.USAGE)
    allowed = () if raw else _allowed(topic)
    refused: list[str] = []
    sent = 0
    with reached(bootstrap) as settings:
        check(connect(settings), settings, {topic: [Operation.WRITE]})
        publisher = Publisher(settings, "tentalis-produce", make_codec(settings, patience=0.0))
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as lines:
            try:
                if raw:
                    value = checked_size(topic, key or "", lines.read())
                    if not dry_run:
                        publisher.send_bytes(topic, None if key is None else key.encode(), value)
                    sent = 1
                else:
                    for problem in written(None if dry_run else publisher, topic, lines, allowed):
                        if problem is None:
                            sent += 1
                        else:
                            refused.append(problem)
                            typer.echo(f"error: {problem}", err=True)
            finally:
                publisher.flush()
                if output is not OutputFormat.TABLE:
                    print_data(output, {"topic": topic, "records": sent, "refused": len(refused)})
                else:
                    typer.echo(f"{'would write' if dry_run else 'wrote'} {sent} records to {topic}", err=True)
    if refused:
        raise CommandError(f"{len(refused)} of {sent + len(refused)} lines were refused")


def _allowed(topic: str) -> tuple[str, ...]:
    from schemas.topics import table

    allowed = table().topics[topic].records if topic in table().topics else ()
    if not allowed:
        raise CommandError(f"{topic} holds no Avro records of Tentalis; --raw sends bytes unchanged", ExitCode.USAGE)
    return allowed


def written(
    publisher: Publisher | None, topic: str, lines: Iterable[bytes], allowed: tuple[str, ...]
) -> Iterator[str | None]:
    """Sends the record of each non-blank line, or only validates it if there is no publisher. Yields None for a valid
    record, else the line number and the problem."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parsed(line, allowed)
            if publisher is not None:
                publisher.send(topic, record)
        except OverflowError:
            yield f"line {number}: a number does not fit the 64 bits of its field"
        except ValueError as error:
            yield f"line {number}: {error}"
        else:
            yield None


def parsed(line: bytes, allowed: tuple[str, ...]) -> Record:
    """Returns the record of a line. Raises ValueError with a message for the user."""
    from pydantic import ValidationError

    from schemas.problems import problems
    from schemas.records import RECORDS
    from tentalis.cli.shared.record_json import from_plain

    try:
        data = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, not a {type(data).__name__}")
    name = allowed[0] if len(allowed) == 1 else None
    if "type" in data and "value" in data:
        name, data = data["type"], data["value"]
    if name not in allowed:
        wanted = " or ".join(allowed)
        raise ValueError(f'missing or unknown record type: give {{"type": ..., "value": {{...}}}} with {wanted}')
    try:
        return from_plain(RECORDS[name], data)
    except ValidationError as error:
        raise ValueError(f"not a {name}: {problems(error, 'record')}") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a {name}: {error}") from error
