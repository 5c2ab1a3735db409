"""A fuzz run fails for each record that is neither valid nor dead once with its own bytes."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from schemas import topics
from schemas.place import RecordPlace
from schemas.topics import dlq
from tentalis.dlq.context import context_headers
from tentalis.dlq.records import RawRecord
from tentalis.kafka.partitioner import partition_of
from tests.chaos.account import account, is_invalid, reasons
from tests.support.fuzzing import CODEC, Fuzzed
from tests.support.stream_records import make_result, make_task

TASK = make_task("t1")
VALID = Fuzzed(topics.TASKS, 3, TASK.key.encode(), CODEC.encode(topics.TASKS, TASK), (), "none")
BROKEN = replace(VALID, value=b"\xff\xff", damage="noise")
MISPLACED = replace(VALID, key=b"another", damage="key")
SENT = {RecordPlace(topics.TASKS, 3, offset): each for offset, each in enumerate((VALID, BROKEN, MISPLACED))}


def letter(offset: int, record: Fuzzed, **changes: Any) -> RawRecord:
    context: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": offset,
        "timestamp": 5_000,
        "group": "tentalis-scoring",
        "error_class": "ValueError",
        "error": "bad",
        "stage": "decode",
        "attempts": 1,
        "version": "0.1",
        "failed_at": 1_000.0,
    }
    headers = context_headers(**(context | changes))
    return RawRecord(dlq(record.topic), record.partition, 7, 6_000, record.key, record.value, headers)


LETTERS = [letter(1, BROKEN), letter(2, MISPLACED, stage="validate")]


def wrong(letters: Iterable[RawRecord], *elsewhere: RawRecord) -> dict[str, Any]:
    """Returns each difference that the account finds, with its size."""

    def read(names: Collection[str]) -> Iterable[RawRecord]:
        return [raw for raw in elsewhere if raw.topic in names]

    found = account(SENT, letters, read)
    assert bool(reasons(found, {})) == any(found[what] for what in ("lost", "altered", "doubled", "unforeseen"))
    return {what: found[what] for what in ("lost", "altered", "doubled", "unforeseen") if found[what]}


def test_every_record_valid_or_dead_is_sound() -> None:
    assert wrong(LETTERS) == {}


def test_what_is_paired_has_to_lie_where_its_key_does() -> None:
    result = make_result()
    value, right = CODEC.encode(topics.RESULTS, result), partition_of(result.key.encode(), 8)
    at_home = Fuzzed(topics.RESULTS, right, result.key.encode(), value, (), "none")
    assert not is_invalid(at_home)
    assert is_invalid(replace(at_home, partition=(right + 1) % 8))


@pytest.mark.parametrize("missing", [0, 1])
def test_an_invalid_record_without_a_letter_is_lost(missing: int) -> None:
    assert wrong([LETTERS[1 - missing]]) == {"lost": 1}


def test_a_valid_record_may_be_refused() -> None:
    assert wrong([*LETTERS, letter(0, VALID, stage="validate")]) == {}


@pytest.mark.parametrize("changes", [{"value": b"\xff"}, {"value": None}, {"key": b"x"}, {"headers": ()}])
def test_a_letter_has_the_bytes_of_its_record(changes: dict[str, Any]) -> None:
    assert wrong([*LETTERS, replace(letter(0, VALID), **changes)]) == {"altered": 1}


def test_a_second_letter_of_a_record_is_seen() -> None:
    assert wrong([*LETTERS, LETTERS[0]]) == {"doubled": 1}


def test_a_letter_for_what_an_application_stumbled_over_is_unforeseen() -> None:
    found = wrong([*LETTERS, letter(0, VALID, stage="process", error_class="KeyError")])
    assert list(found["unforeseen"]) == ["tentalis-scoring KeyError: bad"]


def test_a_letter_of_what_an_application_made_has_its_bytes_and_comes_once() -> None:
    made = RawRecord(topics.TASKS, 3, 9, 0, VALID.key, VALID.value)
    of_made = letter(9, VALID, stage="validate")
    assert wrong([*LETTERS, of_made], made) == {}
    assert wrong([*LETTERS, of_made]) == {"altered": 1}
    assert wrong([*LETTERS, of_made], replace(made, value=b"")) == {"altered": 1}
    assert wrong([*LETTERS, of_made, of_made], made) == {"doubled": 1}


def test_an_application_that_grows_is_a_reason() -> None:
    sound = account(SENT, LETTERS, lambda names: ())
    assert reasons(sound, {"join": 10.0, "scoring": 100.0}) == ["scoring grew by 100 MB; the limit is 64"]
