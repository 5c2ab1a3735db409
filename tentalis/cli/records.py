"""`tentalis consume` and `tentalis produce`: single records, Avro on the log and JSON here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import USAGE, Bootstrap, CommandError, Format, Output, print_json, reached

if TYPE_CHECKING:
    from schemas.records import Record
    from tentalis.kafka import Publisher

TopicName = Annotated[str, typer.Argument(help="Name of the topic.")]
WIDTHS = (2, 8, 24, 40, 12)
PREVIEW = 160


def consume(
    topic: TopicName,
    count: Annotated[int | None, typer.Option("-n", "--count", min=1, help="Stop after so many records.")] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="earliest, latest, OFFSET, -N (last N per partition), or a time: RFC 3339, or 30m, 1h, 2d ago.",
        ),
    ] = "earliest",
    key: Annotated[str | None, typer.Option("--key", help="Only records with this key.")] = None,
    leave: Annotated[bool, typer.Option("--exit", help="Stop at the end of the topic.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Shows records.

    As JSON: one object per line, token fields as lists of numbers (non-finite ones as strings), bytes that are no
    record as base64 with the reason in `error`, dead letters with their context in `dlq`.
    """
    from tentalis.cli.tail import as_object, parse_start, tail
    from tentalis.kafka import make_codec, now_ms

    where = parse_start(start, now_ms())
    with reached(bootstrap) as settings, closing(tail(settings, topic, where, stop_at_end=leave)) as log:
        codec = make_codec(settings, patience=0.0)
        wanted = (stored for stored in log if key is None or stored.key == key)
        for seen, stored in enumerate(wanted, 1):
            found = as_object(stored, codec)
            if output is Output.JSON:
                print_json(found)
            else:
                _print_row(found)
            if seen == count:
                return


def _print_row(found: dict[str, Any]) -> None:
    reason = found.get("error") or found.get("dlq", {}).get("error-message")
    kind = found.get("type") or ("tombstone" if "tombstone" in found else "error" if reason else "bytes")
    value = found["value"] if "value" in found else reason or found.get("value_base64", "")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    head = (found["partition"], found["offset"], found["timestamp"], found["key"], kind)
    line = "  ".join(str(item).ljust(width) for item, width in zip(head, WIDTHS, strict=True))
    shown = " ".join(text.split())
    sys.stdout.write(f"{line}  {shown[:PREVIEW]}{'...' if len(shown) > PREVIEW else ''}\n")
    sys.stdout.flush()


def produce(
    topic: TopicName,
    file: Annotated[Path, typer.Option("--file", help="JSON Lines; - is standard input.")] = Path("-"),
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes of the file as they are, as one record.")] = False,
    key: Annotated[str | None, typer.Option("--key", help="Key of a raw record.")] = None,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Writes records from JSON Lines.

    They are checked as their readers check them; key and headers are set from the record. A line is
    the record, or {"type": NAME, "value": RECORD} as `consume -o json` prints it. A line that is none is
    named with the reason and passed over; the exit code is then 1.
    """
    from tentalis.access import check, connect
    from tentalis.acls import Operation
    from tentalis.kafka import Publisher, checked_size, make_codec

    if key is not None and not raw:
        raise CommandError("--key goes with --raw: a record has the key that its fields give", USAGE)
    allowed = () if raw else _allowed(topic)
    refused: list[str] = []
    sent = 0
    with reached(bootstrap) as settings:
        check(connect(settings), settings, {topic: [Operation.WRITE]})
        publisher = Publisher(settings, "tentalis-produce", make_codec(settings, patience=0.0))
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as lines:
            try:
                if raw:
                    publisher.send_bytes(
                        topic, None if key is None else key.encode(), checked_size(topic, key or "", lines.read())
                    )
                    sent = 1
                else:
                    for problem in written(publisher, topic, lines, allowed):
                        if problem is None:
                            sent += 1
                        else:
                            refused.append(problem)
                            typer.echo(f"error: {problem}", err=True)
            finally:
                publisher.flush()
                if output is Output.JSON:
                    print_json({"topic": topic, "records": sent, "refused": len(refused)})
                else:
                    typer.echo(f"wrote {sent} records to {topic}", err=True)
    if refused:
        raise CommandError(f"{len(refused)} of {sent + len(refused)} lines were refused")


def _allowed(topic: str) -> tuple[str, ...]:
    from schemas.topics import table

    allowed = table().topics[topic].records if topic in table().topics else ()
    if not allowed:
        raise CommandError(f"{topic} holds no records of ours; --raw sends bytes as they are", USAGE)
    return allowed


def written(publisher: Publisher, topic: str, lines: Iterable[bytes], allowed: tuple[str, ...]) -> Iterator[str | None]:
    """Sends the record of each line that is not blank; yields None for it, or what is wrong with the line, by its
    number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            publisher.send(topic, parsed(line, allowed))
        except OverflowError:
            yield f"line {number}: a number is out of the 64 bits of its field"
        except ValueError as error:
            yield f"line {number}: {error}"
        else:
            yield None


def parsed(line: bytes, allowed: tuple[str, ...]) -> Record:
    """The record of a line. Raises ValueError, in words for a person."""
    from pydantic import ValidationError

    from schemas.problems import problems
    from schemas.records import RECORDS
    from tentalis.cli.values import from_plain

    try:
        data = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"a {type(data).__name__} where an object is expected")
    name = allowed[0] if len(allowed) == 1 else None
    if "type" in data and "value" in data:
        name, data = data["type"], data["value"]
    if name not in allowed:
        wanted = " or ".join(allowed)
        raise ValueError(f'say which record it is: {{"type": ..., "value": {{...}}}} with {wanted}')
    try:
        return from_plain(RECORDS[name], data)
    except ValidationError as error:
        raise ValueError(f"not a {name}: {problems(error, 'record')}") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a {name}: {error}") from error
