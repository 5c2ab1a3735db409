"""Dead letters without a broker: what a letter and a mark are, whose mark counts, what may be replayed."""

import random
from dataclasses import replace

import pytest

from schemas import topics
from schemas.place import RecordPlace
from schemas.topics import dlq
from tentalis.cli.dlq import _page, _row, _short, _whole
from tentalis.dlq.context import PREFIX, context_headers
from tentalis.dlq.records import (
    UNMARKED,
    Case,
    Filter,
    LetterHistory,
    LetterState,
    RawRecord,
    context_of,
    letter_of,
    mark_headers,
    mark_of,
    newer_under_key,
    own_headers,
    refusal,
    replay_partition,
)
from tentalis.kafka.partitioner import partition_of
from tests.support.stream_records import CODEC, make_task

TABLE = topics.table()
PARTITIONS = {name: topic.partitions for name, topic in TABLE.topics.items()}
NOW = 1_800_000_000_000


def letter(offset: int = 4, *, original: object = 17, topic: str = topics.TASKS, **changes: object) -> RawRecord:
    fields: dict[str, object] = {
        "topic": topic,
        "partition": 3,
        "offset": original,
        "timestamp": 5_000,
        "group": "tentalis-scoring",
        "error_class": "schemas.wire.codec.DecodeError",
        "error": "bad magic ffff",
        "stage": "decode",
        "attempts": 1,
        "version": "0.1",
        "failed_at": 1_000.0 + offset,
    }
    headers = context_headers(**(fields | changes))  # type: ignore[arg-type]
    own = (("ce_id", b"x"), ("empty", None))
    return RawRecord(dlq(topic), 3, offset, 6_000, b"\xffkey", b"\xff\xff", own + headers)


def mark(of: RawRecord, offset: int, after: int, state: LetterState, **more: object) -> RawRecord:
    headers = mark_headers(state, after=after, at="2026-01-01T00:00:00Z", **more)  # type: ignore[arg-type]
    return RawRecord(of.topic, of.partition, offset, 7_000, letter_of(of).id.encode(), None, tuple(headers))


def folded(*raws: RawRecord) -> list[Case]:
    history = LetterHistory()
    for raw in raws:
        history.add(raw)
    return history.cases()


def why(case: Case, *, again: bool = False, partitions: dict[str, int] | None = None) -> str:
    refused = refusal(case, TABLE, PARTITIONS if partitions is None else partitions, {}, again=again)
    return refused.reason if refused else ""


def test_a_letter_is_what_its_headers_say() -> None:
    found = letter_of(letter())
    assert found.origin == RecordPlace(topics.TASKS, 3, 17) and found.foreign == ""
    assert (found.group, found.stage, found.attempts) == ("tentalis-scoring", "decode", "1")
    assert (found.error_class, found.error) == ("schemas.wire.codec.DecodeError", "bad magic ffff")
    assert (found.key, found.size, found.failed_at) == (b"\xffkey", 2, 1_004_000)
    assert own_headers(letter().headers) == (("ce_id", b"x"), ("empty", None))
    assert letter_of(replace(letter(), value=None)).size is None


def test_of_headers_that_a_record_brought_along_the_applications_own_count() -> None:
    forged = ((PREFIX + "original-offset", b"99"), (PREFIX + "mark", b"dropped"), (PREFIX + "after", b"-1"))
    raw = replace(letter(), headers=forged + letter().headers, value=None)
    assert mark_of(raw) is None
    assert letter_of(raw).origin == RecordPlace(topics.TASKS, 3, 17)
    assert own_headers(raw.headers) == own_headers(letter().headers)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ((), "it has no original-topic, original-partition"),
        (((PREFIX + "original-topic", None),), "it has no original-partition"),
        (letter(topic=topics.RESULTS).headers, "whose letters belong on another topic"),
        (letter(partition="x").headers, "its original-partition is not a number"),
        (letter(original="-7").headers, "its original-offset is not a number"),
        (letter(original="9" * 400).headers, "its original-offset is not a number"),
        (letter(original="٣").headers, "its original-offset is not a number"),
        (letter(partition=2).headers, "but it is on another partition"),
        (letter(original=-1).headers, "partition 3, offset -1"),
    ],
)
def test_what_somebody_else_wrote_is_foreign_and_not_replayed(
    headers: tuple[tuple[str, bytes | None], ...], reason: str
) -> None:
    (case,) = folded(replace(letter(), headers=headers))
    assert reason in case.letter.foreign
    assert case.letter.origin is None and case.letter.id == str(case.letter.place)
    assert reason in why(case)


def test_garbage_never_ends_the_fold() -> None:
    rng = random.Random(1)
    names = [name for name, _ in letter().headers] + [
        PREFIX + "mark",
        PREFIX + "after",
        PREFIX + "replayed-to",
        "",
        "x",
    ]
    values = [None, b"", b"-1", b"3", b"replayed", b"\xff", b"1e9", b"9" * 30, dlq("").encode(), topics.TASKS.encode()]
    raws = []
    for offset in range(5_000):
        headers = tuple((rng.choice(names), rng.choice(values)) for _ in range(rng.randrange(14)))
        key, value = rng.choice([None, b"", b"\xff", letter_of(letter()).id.encode()]), rng.choice([None, b"v"])
        raws.append(RawRecord(dlq(topics.TASKS), 3, offset, rng.choice([-1, 0, NOW]), key, value, headers))
    cases = folded(*raws)
    assert sum(case.copies for case in cases) == sum(mark_of(raw) is None for raw in raws)
    assert {case.letter.origin for case in cases} == {None}


def test_a_time_that_cannot_be_read_is_that_of_the_letter() -> None:
    headers = tuple((n, b"once upon" if n.endswith("failed-at") else v) for n, v in letter().headers)
    assert letter_of(replace(letter(), headers=headers)).failed_at == 6_000


def test_letters_that_a_killed_application_wrote_again_are_one() -> None:
    (case,) = folded(letter(4), letter(5), letter(6))
    assert (case.copies, case.letter.place.offset) == (3, 4)
    # the same offset of a topic that was deleted and made again is another record
    assert len(folded(letter(4), letter(5, timestamp=9_999))) == 2


def test_the_first_to_mark_a_letter_wins_and_later_marks_build_on_it() -> None:
    first = letter()
    marks = [
        mark(first, 5, UNMARKED, LetterState.REPLAYING),
        mark(first, 6, UNMARKED, LetterState.REPLAYING),  # at the same time, but second on the log
        mark(first, 7, 6, LetterState.REPLAYED, replayed_to=30),  # of the one who lost
        mark(first, 8, 5, LetterState.REPLAYED, replayed_to=31),
    ]
    states = [folded(first, *marks[:n])[0].state for n in range(5)]
    assert states == [
        LetterState.OPEN,
        LetterState.REPLAYING,
        LetterState.REPLAYING,
        LetterState.REPLAYING,
        LetterState.REPLAYED,
    ]
    (case,) = folded(first, *marks)
    assert case.last_mark_offset == 8 and [each.replayed_to for each in case.marks] == [None, 31]
    assert folded(first, *marks, mark(first, 9, 5, LetterState.DROPPED))[0].state is LetterState.REPLAYED
    assert folded(first, *marks, mark(first, 9, 8, LetterState.DROPPED, reason="r"))[0].marks[-1].reason == "r"


def test_marks_count_after_what_came_before_them_reached_its_retention() -> None:
    first = letter()
    kept = [mark(first, 8, 5, LetterState.REPLAYED, replayed_to=31), replace(letter(), offset=9)]
    assert [case.state for case in folded(*kept)] == [LetterState.REPLAYED]
    assert folded(*kept[:1]) == []


def test_a_record_that_fails_again_tells_of_its_earlier_failures() -> None:
    first, second, third = letter(4, original=17), letter(7, original=31), letter(10, original=40)
    cases = folded(
        first,
        mark(first, 5, UNMARKED, LetterState.REPLAYING),
        mark(first, 6, 5, LetterState.REPLAYED, replayed_to=31),
        second,
        mark(second, 8, UNMARKED, LetterState.REPLAYING),
        mark(second, 9, 8, LetterState.REPLAYED, replayed_to=40),
        third,
    )
    assert [[each.place.offset for each in case.earlier] for case in cases] == [[], [4], [4, 7]]
    assert [case.state for case in cases] == [LetterState.REPLAYED, LetterState.REPLAYED, LetterState.OPEN]


def test_a_forged_circle_of_replays_ends() -> None:
    first = letter(4, original=17)
    cases = folded(first, mark(first, 5, UNMARKED, LetterState.REPLAYED, replayed_to=17))
    assert [case.earlier for case in cases] == [()]


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (Filter(), True),
        (Filter(error="decodeerror"), True),
        (Filter(error="magic FFFF"), True),
        (Filter(error="KeyError"), False),
        (Filter(stage="decode"), True),
        (Filter(stage="validate"), False),
        (Filter(group="scoring"), True),
        (Filter(group="tentalis-scoring"), True),
        (Filter(group="hinting"), False),
        (Filter(since=1_004_000), True),
        (Filter(since=1_004_001), False),
        (Filter(until=1_004_001), True),
        (Filter(until=1_004_000), False),
        (Filter(states=[LetterState.OPEN]), True),
        (Filter(states=[LetterState.REPLAYED]), False),
        (Filter(places=[RecordPlace(dlq(topics.TASKS), 3, 4)]), True),
        (Filter(places=[RecordPlace(topics.TASKS, 3, 17)]), True),
        (Filter(places=[RecordPlace(topics.TASKS, 3, 4)]), False),
    ],
)
def test_a_filter_matches_letters_by_each_of_its_fields(wanted: Filter, matches: bool) -> None:
    (case,) = folded(letter())
    assert wanted.matches(case) is matches


def test_an_invalid_place_is_refused() -> None:
    for text in ("t", "t[x]@1", "t[1]@", "[1]@2", "t[1]@2 "):
        with pytest.raises(ValueError, match="is not a place"):
            RecordPlace.parse(text)


def test_what_may_be_replayed() -> None:
    first = letter()
    (case,) = folded(first)
    assert why(case) == "" and why(case, again=True) == ""
    claim = mark(first, 5, UNMARKED, LetterState.REPLAYING)
    (doubtful,) = folded(first, claim)
    assert "did not finish" in why(doubtful) and why(doubtful, again=True) == ""
    for state in (LetterState.REPLAYED, LetterState.DROPPED):
        (done,) = folded(first, claim, mark(first, 6, 5, state))
        assert f"already {state}" in why(done) and why(done, again=True) == ""


def test_a_topic_that_is_not_as_the_table_says_takes_no_replay() -> None:
    (case,) = folded(letter())
    for count in (1, 3, 16):
        assert f"{topics.TASKS} has {count} partitions" in why(case, again=True, partitions={topics.TASKS: count})
    assert "the broker has no topic" in why(case, partitions={})
    (elsewhere,) = folded(letter(topic="other.topic"))
    refused = refusal(elsewhere, TABLE, {"other.topic": 8}, {}, again=True)
    assert refused is not None and refused.drift and "not in schemas/topics.yaml" in refused.reason


def test_a_record_that_lay_on_the_wrong_partition_is_not_put_back_there() -> None:
    said = "its key 't' hashes to partition 5 of 8, but it is on partition 3"
    (case,) = folded(letter(error_class="Misplaced", error=said, stage="validate"))
    assert why(case) == why(case, again=True) == f"on its original partition it would be rejected again: {said}"


def test_after_a_move_to_more_partitions_a_record_goes_to_the_partition_of_its_key() -> None:
    (raw,) = [replace(letter(), key=b"task-1")]
    assert replay_partition(raw, 8) == partition_of(b"task-1", 8)
    assert replay_partition(raw, 12) == partition_of(b"task-1", 12) != partition_of(b"task-1", 8)
    assert replay_partition(replace(raw, key=None), 12) == raw.partition
    forget = (("ce_type", b"tentalis.Forget"),)
    assert replay_partition(replace(raw, headers=forget), 12) == raw.partition


def test_on_a_compacted_topic_a_newer_record_is_not_replaced() -> None:
    cases = folded(letter(topic=topics.ROLLOUTS), letter(5, original=18, topic=topics.ROLLOUTS))
    here = {"topic": topics.ROLLOUTS, "partition": 3, "timestamp": 0, "value": b"v", "key": b"\xffkey"}
    later = [RawRecord(offset=offset, **here) for offset in (17, 18)]  # type: ignore[arg-type]
    newer = newer_under_key(cases, later)
    assert newer == {cases[0].letter.id: 18}
    refused = refusal(cases[0], TABLE, PARTITIONS, newer, again=False)
    assert refused is not None and "newer record under its key, at offset 18" in refused.reason
    assert refusal(cases[1], TABLE, PARTITIONS, newer, again=False) is None


def test_a_mark_is_read_as_it_was_written() -> None:
    raw = mark(letter(), 9, 5, LetterState.REPLAYED, replayed_to=31, reason="größe")
    found = mark_of(raw)
    assert found is not None
    assert (found.state, found.after, found.offset, found.replayed_to) == (LetterState.REPLAYED, 5, 9, 31)
    assert (found.reason, found.at) == ("größe", "2026-01-01T00:00:00Z")
    assert mark_of(replace(raw, value=b"")) is None and mark_of(replace(raw, key=None)) is None
    assert "mark" in context_of(raw.headers) and mark_of(letter()) is None


def test_a_page_shows_all_there_is_and_writes_nothing_to_a_terminal_that_it_would_obey() -> None:
    first = replace(letter(), value=CODEC.encode(topics.TASKS, make_task())[:-9], key=b"\x1b[2J")
    second = replace(letter(10, original=31), value=None)
    done, again = folded(
        first,
        mark(first, 5, UNMARKED, LetterState.REPLAYING),
        mark(first, 6, 5, LetterState.REPLAYED, replayed_to=31),
        second,
    )
    page = _page(_whole(done, first, CODEC))
    assert "key           \\x1b[2J" in page and "\x1b" not in page
    assert "replayed  to offset 31" in page and '"task_id": "t1"' in page and "run_id, byte 109" in page
    assert "00000000  c3 01 " in page
    page = _page(_whole(again, second, CODEC))
    assert str(letter_of(first).place) in page and "bytes (a tombstone)" in page
    (alien,) = folded(replace(letter(), headers=()))
    row = _short(_row(alien))
    assert row["error"].startswith("(foreign: it has no original-topic")
