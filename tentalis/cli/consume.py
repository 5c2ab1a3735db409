"""`tentalis consume`: shows the records of a topic."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.ops.record_filter import RecordFilter

TopicName = Annotated[str, typer.Argument(help="Name of the topic.")]
WIDTHS = (2, 8, 24, 40, 12)
PREVIEW = 160
TICK = "Tick"


def consume(
    topic: TopicName,
    count: Annotated[int | None, typer.Option("-n", "--count", min=1, help="Stop after this many records.")] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="earliest, latest, OFFSET, -N (last N per partition), or a time: RFC 3339, or 30m, 1h, 2d ago.",
        ),
    ] = "earliest",
    end: Annotated[
        str | None,
        typer.Option("--to", help="Stop before this position of each partition: as --from.", show_default=False),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="EXPR",
            help="Only records for which this is true (CEL), such as 'value.reward < 0.0 && key.startsWith(\"t\")'.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only records with this key.")] = None,
    ticks: Annotated[
        bool, typer.Option("--ticks", help="Also the ticks, which applications write as a clock.")
    ] = False,
    leave: Annotated[bool, typer.Option("--exit", help="Stop at the end of the topic.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the records of a topic.

    A filter sees a record as JSON output prints it: topic, partition, offset, timestamp, key, headers, type, value,
    error, dlq, tombstone; null if missing (docs/reference/filter.md). JSON output has one object per line: token fields
    as lists of numbers (non-finite ones as strings), undecodable bytes as base64 with the reason in `error`, dead
    letters with their context in `dlq`.
    """
    from tentalis.cli.shared.topic_tail import as_object, parse_start, tail
    from tentalis.kafka.codec import make_codec
    from tentalis.text.timestamps import now_ms

    now = now_ms()
    where, until = parse_start(start, now), None if end is None else parse_start(end, now, "--to")
    wanted = None if expression is None else _compiled(expression)
    seen = left_out = 0
    with reached(bootstrap) as settings, closing(tail(settings, topic, where, stop_at_end=leave, end=until)) as log:
        codec = make_codec(settings, patience=0.0)
        for stored in log:
            if key is not None and stored.key != key:
                continue
            found = as_object(stored, codec)
            if not ticks and found.get("type") == TICK:
                left_out += 1
                continue
            if wanted is not None and not _matches(wanted, found):
                continue
            seen += 1
            if output is not OutputFormat.TABLE:
                print_data(output, found)
            else:
                _print_row(found)
            if seen == count:
                break
    if left_out:
        typer.echo(f"left out: {left_out} ticks; --ticks shows them", err=True)
    if wanted is not None and wanted.unevaluated:
        typer.echo(
            f"left out: {wanted.unevaluated} records for which the filter has no value ({wanted.first_reason})",
            err=True,
        )


def _compiled(expression: str) -> RecordFilter:
    """Returns the filter of an expression. Raises CommandError."""
    from tentalis.ops.record_filter import BadExpression, RecordFilter

    try:
        return RecordFilter(expression)
    except BadExpression as error:
        raise CommandError(f"--filter: {error}", ExitCode.USAGE) from error


def _matches(wanted: RecordFilter, record: dict[str, Any]) -> bool:
    from tentalis.ops.record_filter import BadExpression

    try:
        return wanted.matches(record)
    except BadExpression as error:
        raise CommandError(f"--filter: {error}", ExitCode.USAGE) from error


def _print_row(found: dict[str, Any]) -> None:
    reason = found.get("error") or found.get("dlq", {}).get("error-message")
    kind = found.get("type") or ("tombstone" if "tombstone" in found else "error" if reason else "bytes")
    value = found["value"] if "value" in found else reason or found.get("value_base64", "")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    head = (found["partition"], found["offset"], found["timestamp"], found["key"], kind)
    line = "  ".join(str(item).ljust(width) for item, width in zip(head, WIDTHS, strict=True))
    shown = " ".join(text.split())
    print_text(f"{line}  {shown[:PREVIEW]}{'...' if len(shown) > PREVIEW else ''}")
