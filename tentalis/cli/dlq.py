"""`tentalis dlq`: the dead letters, what was done about them, and sending them on their way again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import DRIFT, ERROR, USAGE, Bootstrap, CommandError, Format, Output, reached, show
from tentalis.moments import written

if TYPE_CHECKING:
    from schemas.codec import Codec
    from tentalis.dlq.letterbox import Done, Letterbox
    from tentalis.dlq.letters import Case, Filter, Raw

app = typer.Typer(
    help="Dead letters: records that an application could not process, kept byte for byte on TOPIC.dlq.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ERROR_WIDTH = 100
HEX_BYTES = 256
STAGES = ("decode", "validate", "process", "produce")

Letters = Annotated[
    list[str] | None,
    typer.Argument(
        help="TOPIC.dlq[PARTITION]@OFFSET of a letter, or TOPIC[PARTITION]@OFFSET of the record it was.",
        show_default=False,
    ),
]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="Only letters of this topic; repeatable. Default: all topics of ours."),
]
Error = Annotated[str, typer.Option("--error", help="Part of the error's class or message.", show_default=False)]
Stage = Annotated[str, typer.Option("--stage", help=f"{', '.join(STAGES[:-1])} or {STAGES[-1]}.", show_default=False)]
Group = Annotated[str, typer.Option("--group", "--app", help="Application that failed.", show_default=False)]
Since = Annotated[
    str, typer.Option("--since", help="Failed at or after: RFC 3339, or 30m, 1h, 2d ago.", show_default=False)
]
Until = Annotated[str, typer.Option("--until", help="Failed before: as --since.", show_default=False)]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="So many at most, the oldest first.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@contextmanager
def _opened(bootstrap: str | None, names: list[str]) -> Iterator[tuple[Any, Letterbox]]:
    from schemas.topics import table
    from tentalis.admin import KafkaAdmin
    from tentalis.dlq.letterbox import Letterbox
    from tentalis.dlq.letters import SUFFIX

    with reached(bootstrap) as settings:
        if names:
            wanted = {name if name.endswith(SUFFIX) else name + SUFFIX for name in names}
        else:
            wanted = {name for name in table().topics if name.endswith(SUFFIX)} & KafkaAdmin(
                settings
            ).partitions().keys()
        yield settings, Letterbox(settings, sorted(wanted), time.time)


def _filter(letters: list[str] | None, states: tuple[str, ...], filters: dict[str, str]) -> Filter:
    from schemas.place import Place
    from tentalis.dlq.letters import Filter, State
    from tentalis.moments import parse_moment

    if filters["stage"] not in ("", *STAGES):
        raise CommandError(f"--stage {filters['stage']} is none of {', '.join(STAGES)}", USAGE)
    now = int(time.time() * 1000)
    try:
        since, until = (parse_moment(text, now) if text else None for text in (filters["since"], filters["until"]))
        places = [Place.parse(text) for text in letters or ()]
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    return Filter(
        states=tuple(State(state) for state in states),
        places=places,
        error=filters["error"],
        stage=filters["stage"],
        group=filters["group"],
        since=since,
        until=until,
    )


def _topics_of(letters: list[str] | None, topics: list[str] | None) -> list[str]:
    """The topics to read: those named, and those of the letters named."""
    return [*(topics or ()), *(text.partition("[")[0] for text in letters or ())]


def _selected(box: Letterbox, wanted: Filter, limit: int | None = None) -> list[Case]:
    """What matches. A place that no letter has is an error: nobody wants three of the four that they named."""
    cases = box.cases()
    missing = [
        place for place in wanted.places if not any(place in (case.letter.place, case.letter.origin) for case in cases)
    ]
    if missing:
        raise CommandError(f"no dead letter lies at {', '.join(map(str, missing))}, nor was one written for it")
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
    """Text of a stranger for a terminal: what is no character to look at is spelt out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table: one line each."""
    text = f"{row['error_class']}: {row['error']}" if row["foreign"] is None else f"(foreign: {row['foreign']})"
    flat = _printable(" ".join(text.split()))
    return row | {
        "error": flat if len(flat) <= ERROR_WIDTH else flat[: ERROR_WIDTH - 3] + "...",
        "group": row["group"] and _printable(row["group"]),
        "stage": row["stage"] and _printable(row["stage"]),
        "key": None if row["key"] is None else _printable(" ".join(row["key"].split()))[:40],
    }


@app.command("list", short_help="Shows letters, oldest failure first.")
def list_letters(
    topic: Topics = None,
    error: Error = "",
    stage: Stage = "",
    group: Group = "",
    since: Since = "",
    until: Until = "",
    everything: Annotated[bool, typer.Option("--all", help="Also those that were replayed or dropped.")] = False,
    limit: Limit = None,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Shows letters, oldest failure first: the open ones, and those whose replay never told of its end.

    A letter that somebody else wrote, or whose headers make no sense, is listed as foreign.
    """
    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    wanted = _filter(None, () if everything else ("open", "replaying"), filters)
    with _opened(bootstrap, topic or []) as (_, box):
        rows = [_row(case) for case in _selected(box, wanted, limit)]
    if output is Output.TABLE:
        rows = [_short(row) for row in rows]
    show(output, ("letter", "state", "failed", "failures", "group", "stage", "key", "bytes", "error"), rows)


@app.command("show", short_help="Shows all about a letter.")
def show_letters(
    letters: Annotated[list[str], typer.Argument(help="TOPIC.dlq[PARTITION]@OFFSET, or that of the record it was.")],
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Shows all about a letter: headers, error, history, its value as far as it can be decoded, and its bytes."""
    from tentalis.kafka import make_codec

    wanted = _filter(letters, (), dict.fromkeys(("error", "stage", "group", "since", "until"), ""))
    with _opened(bootstrap, _topics_of(letters, None)) as (settings, box):
        cases = _selected(box, wanted)
        raws = box.raw(cases)
        codec = make_codec(settings)
        found = [_whole(case, raws[case.letter.place], codec) for case in cases if case.letter.place in raws]
    if output is Output.JSON:
        show(output, (), found)
        return
    for number, one in enumerate(found):
        print(("\n" if number else "") + _page(one))


def _whole(case: Case, raw: Raw, codec: Codec) -> dict[str, Any]:
    from tentalis.dlq.letters import context_of, own_headers

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


def _decoded(raw: Raw, codec: Codec) -> dict[str, Any]:
    """`type` and `value` if it is a record; else `value` as far as it goes, and where it `ended`."""
    from schemas.codec import DecodeError
    from schemas.topics import table
    from tentalis.cli.values import to_plain
    from tentalis.dlq.letters import SUFFIX

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
    lines.append(f"value ({one['type'] or 'no record'}{', ' + one['ended'] if one['ended'] else ''})")
    if one["value"] is not None:
        lines += ["  " + line for line in json.dumps(one["value"], indent=2, ensure_ascii=False).splitlines()]
    lines.append(f"bytes ({'a tombstone' if one['bytes'] is None else one['bytes']})")
    if one["value_hex"]:
        lines += _hexdump(bytes.fromhex(one["value_hex"][: 2 * HEX_BYTES]))
        if one["bytes"] > HEX_BYTES:
            lines.append(f"  ... {one['bytes'] - HEX_BYTES} more; -o json has them all")
    return "\n".join(map(_printable, lines))


def _hexdump(data: bytes) -> list[str]:
    rows = (data[at : at + 16] for at in range(0, len(data), 16))
    return [
        f"  {at * 16:08x}  {row.hex(' '):<47}  {''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}"
        for at, row in enumerate(rows)
    ]


def _chosen(letters: list[str] | None, topic: list[str] | None, filters: dict[str, str]) -> None:
    if not letters and not topic and not any(filters.values()):
        raise CommandError("say which: name letters, or give --topic or another filter; `dlq list` shows them", USAGE)


def _report(output: Output, done: list[Done], verb: str) -> None:
    from tentalis.dlq.letterbox import Result

    rows = [
        {
            "letter": str(each.case.letter.place),
            "result": verb if each.result is Result.DONE else each.result.value,
            "to": None if each.to is None else str(each.to),
            "key": _key(each.case.letter.key),
            "reason": each.reason or None,
        }
        for each in done
    ]
    show(output, ("letter", "result", "to", "reason"), rows)
    counts = Counter(row["result"] for row in rows)
    typer.echo(
        ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "no letter matches", err=True
    )
    left = [each for each in done if each.result not in (Result.DONE, Result.PLANNED)]
    if left:
        raise typer.Exit(DRIFT if all(each.drift for each in left) else ERROR)


@app.command(short_help="Sends the records of letters once more.")
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
        bool, typer.Option("--again", help="Also letters that were replayed or dropped, or whose replay is in doubt.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Appends the records of open letters to the topic and partition they came from, without the dead letter's headers.

    Key, value and the record's own headers are as they were. A letter is replayed once, whoever asks; should its
    record fail again, the new letter knows of the old. Exits with 1 if any letter was refused or not confirmed, with 3
    if only because the broker differs from the table of topics.
    """
    from tentalis.dlq.letterbox import Result

    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    _chosen(letters, topic, filters)
    # Named letters are answered for one by one; a filter means the open ones.
    wanted = _filter(letters, () if letters or again else ("open",), filters)
    with _opened(bootstrap, _topics_of(letters, topic)) as (settings, box):
        planned = box.plan(_selected(box, wanted, limit), again=again)
        todo = sum(each.result is Result.PLANNED for each in planned)
        if dry_run or not todo:
            _report(output, planned, "replayed")
            return
        if not yes:
            targets = Counter(each.to.topic for each in planned if each.result is Result.PLANNED and each.to)
            what = ", ".join(f"{count} to {name}" for name, count in sorted(targets.items()))
            typer.confirm(f"Replay {what} on {settings.bootstrap}?", abort=True, err=True)
        done: list[Done] = []
        try:
            done.extend(box.replay(planned))
        except Exception:
            typer.echo(f"{sum(each.result is Result.DONE for each in done)} were replayed before this:", err=True)
            raise
    _report(output, done, "replayed")


@app.command(short_help="Marks letters as dropped, with the reason.")
def drop(
    letters: Letters = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why nobody needs them; kept beside them. Not asked for by --dry-run.")
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
    output: Format = Output.TABLE,
) -> None:
    """Marks letters as dropped, with the reason. Their bytes stay where they are until their retention."""
    from tentalis.dlq.letterbox import Done, Result

    filters = {"error": error, "stage": stage, "group": group, "since": since, "until": until}
    _chosen(letters, topic, filters)
    if not dry_run and not reason.strip():
        raise CommandError("there is no --reason: say why nobody needs them", USAGE)
    wanted = _filter(letters, () if letters else ("open", "replaying"), filters)
    with _opened(bootstrap, _topics_of(letters, topic)) as (settings, box):
        cases = _selected(box, wanted, limit)
        if dry_run or not cases:
            _report(output, [Done(case, Result.PLANNED) for case in cases], "dropped")
            return
        if not yes:
            typer.confirm(f"Drop {len(cases)} letters on {settings.bootstrap}?", abort=True, err=True)
        done = box.drop(cases, reason)
    _report(output, done, "dropped")
