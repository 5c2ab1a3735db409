"""`tentalis dlq`: lists, shows, replays and drops dead letters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes, ask
from tentalis.cli.shared.output import Format, OutputFormat, print_text, show
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode
from tentalis.text.timestamps import written

if TYPE_CHECKING:
    from schemas.wire.codec import Codec
    from tentalis.dlq.actions import ActionOutcome, DeadLetterActions
    from tentalis.dlq.records import Case, Filter, RawRecord

app = typer.Typer(
    help="Dead letters: records that an application could not process, kept byte for byte on TOPIC.dlq.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ERROR_WIDTH = 100
HEX_BYTES = 256
STAGES = ("decode", "validate", "process", "produce", "skip")

Letters = Annotated[
    list[str] | None,
    typer.Argument(
        help="TOPIC.dlq[PARTITION]@OFFSET of a dead letter, or TOPIC[PARTITION]@OFFSET of the original record.",
        show_default=False,
    ),
]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="Only dead letters of this topic; repeatable. Default: all topics of Tentalis."),
]
Error = Annotated[str, typer.Option("--error", help="Part of the error's class or message.", show_default=False)]
Stage = Annotated[str, typer.Option("--stage", help=f"{', '.join(STAGES[:-1])} or {STAGES[-1]}.", show_default=False)]
Group = Annotated[str, typer.Option("--group", "--app", help="Application that failed.", show_default=False)]
Since = Annotated[
    str, typer.Option("--since", help="Failed at or after: RFC 3339, or 30m, 1h, 2d ago.", show_default=False)
]
Until = Annotated[str, typer.Option("--until", help="Failed before: as --since.", show_default=False)]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most this many, oldest first.")]


@contextmanager
def _opened(bootstrap: str | None, names: list[str]) -> Iterator[tuple[Any, DeadLetterActions]]:
    from schemas.topics import table
    from tentalis.dlq.actions import DeadLetterActions
    from tentalis.dlq.records import SUFFIX
    from tentalis.kafka.admin import KafkaAdmin

    with reached(bootstrap) as settings:
        if names:
            wanted = {name if name.endswith(SUFFIX) else name + SUFFIX for name in names}
        else:
            wanted = {name for name in table().topics if name.endswith(SUFFIX)} & KafkaAdmin(
                settings
            ).partitions().keys()
        yield settings, DeadLetterActions(settings, sorted(wanted), time.time)


def _filter(letters: list[str] | None, states: tuple[str, ...], filters: dict[str, str]) -> Filter:
    from schemas.place import RecordPlace
    from tentalis.dlq.records import Filter, LetterState

    if filters["stage"] not in ("", *STAGES):
        raise CommandError(f"--stage {filters['stage']} is not one of {', '.join(STAGES)}", ExitCode.USAGE)
    now = int(time.time() * 1000)
    try:
        places = [RecordPlace.parse(text) for text in letters or ()]
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    since, until = (
        moment_of(f"--{name}", filters[name], now) if filters[name] else None for name in ("since", "until")
    )
    return Filter(
        states=tuple(LetterState(state) for state in states),
        places=places,
        error=filters["error"],
        stage=filters["stage"],
        group=filters["group"],
        since=since,
        until=until,
    )


def _topics_of(letters: list[str] | None, topics: list[str] | None) -> list[str]:
    """Returns the topics to read: the named ones and those of the named dead letters."""
    return [*(topics or ()), *(text.partition("[")[0] for text in letters or ())]


def _selected(box: DeadLetterActions, wanted: Filter, limit: int | None = None) -> list[Case]:
    """Returns the matching dead letters. Raises CommandError if one of the named places has none."""
    cases = box.cases()
    missing = [
        place for place in wanted.places if not any(place in (case.letter.place, case.letter.origin) for case in cases)
    ]
    if missing:
        raise CommandError(f"there is no dead letter at {', '.join(map(str, missing))}, nor one for a record there")
    return [case for case in cases if wanted.matches(case)][:limit]


def _key(key: bytes | None) -> str | None:
    return None if key is None else key.decode("utf-8", "backslashreplace")


def _row(case: Case) -> dict[str, Any]:
    letter = case.letter
    last = case.marks[-1] if case.marks else None
    return {
        "letter": str(letter.place),
        "state": case.state.value,
        "failed": written(letter.failed_at),
        "failures": len(case.earlier) + 1,
        "first_failed": written((case.earlier[0] if case.earlier else letter).failed_at),
        "record": None if letter.origin is None else str(letter.origin),
        "group": letter.group or None,
        "stage": letter.stage or None,
        "error_class": letter.error_class or None,
        "error": letter.error or None,
        "attempts": letter.attempts or None,
        "version": letter.version or None,
        "key": _key(letter.key),
        "bytes": letter.size,
        "copies": case.copies,
        "foreign": letter.foreign or None,
        "marked": last.at if last else None,
        "reason": (last.reason or None) if last else None,
    }


def _printable(text: str) -> str:
    """Escapes the unprintable characters of untrusted text for a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Shortens the fields of a row so that it fits one line of the table."""
    text = f"{row['error_class']}: {row['error']}" if row["foreign"] is None else f"(foreign: {row['foreign']})"
    flat = _printable(" ".join(text.split()))
    return row | {
        "error": flat if len(flat) <= ERROR_WIDTH else flat[: ERROR_WIDTH - 3] + "...",
        "group": row["group"] and _printable(row["group"]),
        "stage": row["stage"] and _printable(row["stage"]),
        "key": None if row["key"] is None else _printable(" ".join(row["key"].split()))[:40],
    }


@app.command("list", short_help="List dead letters, oldest failure first.")
def list_letters(
    topic: Topics = None,
    error: Error = "",
    stage: Stage = "",
    group: Group = "",
    since: Since = "",
    until: Until = "",
    everything: Annotated[bool, typer.Option("--all", help="Include replayed and dropped dead letters.")] = False,
    limit: Limit = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists dead letters, oldest failure first: open ones, and those whose replay was not confirmed.

    Dead letters of other programs, or with invalid headers, are listed as foreign.
    """
    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    wanted = _filter(None, () if everything else ("open", "replaying"), filters)
    with _opened(bootstrap, topic or []) as (_, box):
        rows = [_row(case) for case in _selected(box, wanted, limit)]
    if output is OutputFormat.TABLE:
        rows = [_short(row) for row in rows]
    show(output, ("letter", "state", "failed", "failures", "group", "stage", "key", "bytes", "error"), rows)


@app.command("show", short_help="Show dead letters in full.")
def show_letters(
    letters: Annotated[list[str], typer.Argument(help="TOPIC.dlq[PARTITION]@OFFSET, or place of the original record.")],
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows dead letters in full: headers, error, history, the decodable part of the value, and the bytes."""
    from tentalis.kafka.codec import make_codec

    wanted = _filter(letters, (), dict.fromkeys(("error", "stage", "group", "since", "until"), ""))
    with _opened(bootstrap, _topics_of(letters, None)) as (settings, box):
        cases = _selected(box, wanted)
        raws = box.raw(cases)
        codec = make_codec(settings)
        found = [_whole(case, raws[case.letter.place], codec) for case in cases if case.letter.place in raws]
    if output is not OutputFormat.TABLE:
        show(output, (), found)
        return
    for number, one in enumerate(found):
        print_text(("\n" if number else "") + _page(one))


def _whole(case: Case, raw: RawRecord, codec: Codec) -> dict[str, Any]:
    from tentalis.dlq.records import context_of, own_headers

    def text(value: bytes | None) -> str | None:
        return None if value is None else value.decode("utf-8", "backslashreplace")

    return _row(case) | {
        "context": context_of(raw.headers),
        "headers": {name: text(value) for name, value in own_headers(raw.headers)},
        "history": [
            *(
                {"at": written(one.failed_at), "what": "failed", "letter": str(one.place), "error": one.error}
                for one in case.earlier
            ),
            {
                "at": written(case.letter.failed_at),
                "what": "failed",
                "letter": str(case.letter.place),
                "error": case.letter.error,
            },
            *(
                {
                    "at": mark.at,
                    "what": mark.state.value,
                    "reason": mark.reason or None,
                    "replayed_to": mark.replayed_to,
                }
                for mark in case.marks
            ),
        ],
        "key_hex": None if raw.key is None else raw.key.hex(),
        "value_hex": None if raw.value is None else raw.value.hex(),
        **_decoded(raw, codec),
    }


def _decoded(raw: RawRecord, codec: Codec) -> dict[str, Any]:
    """Returns `type` and `value` of a record; else the decodable part as `value`, and in `ended` why it stops there."""
    from schemas.topics import table
    from schemas.wire.codec import DecodeError
    from tentalis.cli.shared.record_json import to_plain
    from tentalis.dlq.records import SUFFIX

    topic = raw.topic.removesuffix(SUFFIX)
    known = table().topics.get(topic)
    expected = known.records if known is not None else None
    try:
        record = codec.decode(raw.value, topic=topic, partition=raw.partition, offset=raw.offset, expected=expected)
    except DecodeError as error:
        partial = None if raw.value is None else codec.partial(raw.value)
        if partial is None:
            return {"type": None, "value": None, "ended": error.reason}
        name, value, ended = partial
        return {"type": name, "value": to_plain(value), "ended": ended or error.reason}
    return {"type": type(record).__name__, "value": to_plain(record), "ended": None}


def _page(one: dict[str, Any]) -> str:
    import json

    lines = [
        f"{name:<13} {one[name]}" for name in ("letter", "state", "record", "group", "stage", "attempts", "version")
    ]
    lines.append(f"{'key':<13} {one['key']}")
    if one["foreign"]:
        lines.append(f"{'foreign':<13} {one['foreign']}")
    else:
        lines.append(f"{'error':<13} {one['error_class']}: {one['error']}")
    lines.append("history")
    for step in one["history"]:
        detail = [step.get("letter"), step.get("error"), step.get("reason")]
        detail += [f"to offset {step['replayed_to']}"] if step.get("replayed_to") is not None else []
        lines.append(f"  {step['at']}  {step['what']}  {'  '.join(str(item) for item in detail if item)}")
    lines.append("headers")
    lines += [f"  {name}: {value}" for name, value in one["headers"].items()]
    lines.append(f"value ({one['type'] or 'not a record'}{', ' + one['ended'] if one['ended'] else ''})")
    if one["value"] is not None:
        lines += ["  " + line for line in json.dumps(one["value"], indent=2, ensure_ascii=False).splitlines()]
    lines.append(f"bytes ({'a tombstone' if one['bytes'] is None else one['bytes']})")
    if one["value_hex"]:
        lines += _hexdump(bytes.fromhex(one["value_hex"][: 2 * HEX_BYTES]))
        if one["bytes"] > HEX_BYTES:
            lines.append(f"  ... {one['bytes'] - HEX_BYTES} more; -o json prints all of them")
    return "\n".join(map(_printable, lines))


def _hexdump(data: bytes) -> list[str]:
    rows = (data[at : at + 16] for at in range(0, len(data), 16))
    return [
        f"  {at * 16:08x}  {row.hex(' '):<47}  {''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}"
        for at, row in enumerate(rows)
    ]


def _chosen(letters: list[str] | None, topic: list[str] | None, filters: dict[str, str]) -> None:
    if not letters and not topic and not any(filters.values()):
        raise CommandError(
            "nothing is selected: name dead letters (see `tentalis dlq list`), or give a filter", ExitCode.USAGE
        )


def _report(output: OutputFormat, done: list[ActionOutcome], verb: str) -> None:
    from tentalis.dlq.actions import ActionResult

    rows = [
        {
            "letter": str(each.case.letter.place),
            "result": verb if each.result is ActionResult.DONE else each.result.value,
            "to": None if each.to is None else str(each.to),
            "key": _key(each.case.letter.key),
            "reason": each.reason or None,
        }
        for each in done
    ]
    show(output, ("letter", "result", "to", "reason"), rows)
    counts = Counter(row["result"] for row in rows)
    typer.echo(
        ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "no dead letter matches", err=True
    )
    left = [each for each in done if each.result not in (ActionResult.DONE, ActionResult.PLANNED)]
    if left:
        raise typer.Exit(ExitCode.DRIFT if all(each.drift for each in left) else ExitCode.ERROR)


@app.command(short_help="Send the original records again.")
def replay(
    letters: Letters = None,
    topic: Topics = None,
    error: Error = "",
    stage: Stage = "",
    group: Group = "",
    since: Since = "",
    until: Until = "",
    limit: Limit = None,
    again: Annotated[
        bool, typer.Option("--again", help="Include replayed, dropped and unconfirmed dead letters.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Appends the records of open dead letters to their original topic, without the dead-letter headers.

    They go to the original partition; on the keyed topics, to the partition of the key. Key, value and the record's own
    headers are unchanged. A dead letter is replayed only once, even if several people ask; if its record fails again,
    the new dead letter refers to the old one. Exits with 1 if a dead letter was refused or its replay not confirmed,
    with 3 if the only cause is that the broker differs from schemas/topics.yaml.
    """
    from tentalis.dlq.actions import ActionResult

    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    _chosen(letters, topic, filters)
    # Every named dead letter gets a result, whatever its state; a filter selects open ones only.
    wanted = _filter(letters, () if letters or again else ("open",), filters)
    with _opened(bootstrap, _topics_of(letters, topic)) as (settings, box):
        planned = box.plan(_selected(box, wanted, limit), again=again)
        todo = sum(each.result is ActionResult.PLANNED for each in planned)
        if dry_run or not todo:
            _report(output, planned, "replayed")
            return
        if not yes:
            targets = Counter(each.to.topic for each in planned if each.result is ActionResult.PLANNED and each.to)
            what = ", ".join(f"{count} to {name}" for name, count in sorted(targets.items()))
            ask(f"Replay {what} on {settings.bootstrap}?")
        done: list[ActionOutcome] = []
        try:
            done.extend(box.replay(planned))
        except Exception:
            typer.echo(
                f"{sum(each.result is ActionResult.DONE for each in done)} were replayed before this error:", err=True
            )
            raise
    _report(output, done, "replayed")


@app.command(short_help="Mark dead letters as dropped, with a reason.")
def drop(
    letters: Letters = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why the records are not needed; stored. Optional with --dry-run.")
    ] = "",
    topic: Topics = None,
    error: Error = "",
    stage: Stage = "",
    group: Group = "",
    since: Since = "",
    until: Until = "",
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Marks dead letters as dropped, with the reason. Their bytes stay on the topic until its retention ends."""
    from tentalis.dlq.actions import ActionOutcome, ActionResult

    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    _chosen(letters, topic, filters)
    if not dry_run and not reason.strip():
        raise CommandError("no --reason is given: say why the records are not needed", ExitCode.USAGE)
    wanted = _filter(letters, () if letters else ("open", "replaying"), filters)
    with _opened(bootstrap, _topics_of(letters, topic)) as (settings, box):
        cases = _selected(box, wanted, limit)
        if dry_run or not cases:
            _report(output, [ActionOutcome(case, ActionResult.PLANNED) for case in cases], "dropped")
            return
        if not yes:
            ask(f"Drop {len(cases)} dead letters on {settings.bootstrap}?")
        done = box.drop(cases, reason)
    _report(output, done, "dropped")
