"""Applied offsets, the changelog's fold, dead letters and their limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.runtime.dlq import check, letter
from streams.runtime.processor import Change, Dead, LogRecord, applied_offset, payload_of, stamped
from streams.runtime.state import ChangelogFold, Entry, ForeignRecord, StateStore, as_entries, entry_of
from tentalis.dlq.limits import DeadLetterLimits, TooManyDead
from tentalis.service.lifecycle import Unmendable


def fold(*entries: Entry) -> ChangelogFold:
    made = ChangelogFold()
    for entry in entries:
        made.add(entry)
    return made


def value(offset: int, text: str = "") -> Entry:
    return Entry("k", stamped(offset, text.encode()), offset)


@given(st.integers(-(2**63), 2**63 - 1), st.binary())
def test_a_stamp_is_read_back(offset: int, payload: bytes) -> None:
    assert (applied_offset(stamped(offset, payload)), payload_of(stamped(offset, payload))) == (offset, payload)


def test_a_value_without_a_stamp_is_an_error() -> None:
    with pytest.raises(ValueError, match="7 bytes has no applied offset"):
        applied_offset(b"1234567")


def test_the_greatest_offset_wins_not_the_last_written() -> None:
    made = fold(value(5, "old"), value(9, "new"), value(7, "zombie"))
    assert made.state() == {"k": stamped(9, b"new")}
    assert made.overwritten() == [value(9, "new")]


def test_a_late_deletion_does_not_win_either_and_a_newer_one_does() -> None:
    assert fold(value(9), Entry("k", None, 8)).state() == {"k": stamped(9, b"")}
    made = fold(value(9), Entry("k", None, 10), value(9, "zombie"))
    assert made.state() == {}
    assert made.overwritten() == [Entry("k", None, 10)]


def test_of_equal_offsets_the_later_written_wins() -> None:
    made = fold(value(9, "a"), value(9, "b"))
    assert made.state() == {"k": stamped(9, b"b")}
    assert made.overwritten() == []


def test_what_was_written_again_is_no_longer_overwritten() -> None:
    assert fold(value(9), value(7), value(9)).overwritten() == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=30), st.randoms())
def test_the_fold_depends_on_offsets_and_not_on_the_order_of_writing(
    writes: list[tuple[str, int, bool]], chance: "object"
) -> None:
    entries = [
        Entry(key, None if deleted else stamped(offset, f"{key}{offset}".encode()), offset)
        for key, offset, deleted in {(k, o): (k, o, d) for k, o, d in writes}.values()
    ]
    shuffled = list(entries)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fold(*entries).state() == fold(*shuffled).state()


def test_a_deletion_is_stamped_to_beat_what_it_deletes_and_no_more() -> None:
    current = {"before": stamped(3, b""), "ahead": stamped(80, b"")}
    waves: list[list[Change]] = [[("before", None), ("ahead", None), ("new", stamped(70, b""))], [("new", None)]]
    assert as_entries(waves, current, 60) == [
        Entry("before", None, 60),
        Entry("ahead", None, 80),
        Entry("new", stamped(70, b""), 70),
        Entry("new", None, 70),
    ]


def test_foreign_changelog_records_are_named() -> None:
    with pytest.raises(ForeignRecord, match=r"app-state-changelog\[2\]@11 \(key 'k'\) has no valid applied offset"):
        entry_of("app-state-changelog", 2, 11, b"k", b"abc", ())
    with pytest.raises(
        ForeignRecord, match=r"delete app-state-changelog, .* reset .* the beginning .* never to the changelog"
    ):
        entry_of("app-state-changelog", 2, 11, b"k", None, ())
    with pytest.raises(ForeignRecord, match="has no key"):
        entry_of("app-state-changelog", 2, 11, None, None, ())
    assert issubclass(ForeignRecord, Unmendable), "it is read again at every start"
    assert entry_of("t", 0, 0, b"\xff", None, (("offset", b"12"),)) == Entry("\udcff", None, 12)


def test_the_store_gives_a_view_that_cannot_be_written() -> None:
    store = StateStore()
    store.load(1, {"a": b"1"})
    store.apply(1, [Entry("b", b"2", 0), Entry("a", None, 0)])
    assert dict(store.entries(1)) == {"b": b"2"}
    with pytest.raises(TypeError):
        store.entries(1)["x"] = b""  # type: ignore[index]
    store.drop(1)
    assert dict(store.entries(1)) == {}


def test_a_dead_letter_keeps_bytes_and_headers_and_says_why_in_ascii() -> None:
    record = LogRecord("in", 2, 41, 1700000000123, "\udcff", b"\x00\xff", (("h", b"1"), ("h", b"2")))
    produced = letter(
        Dead.of(record, "decode", ValueError("größer" * 1000)), group="app", attempts=2, version="0.1", failed_at=0.0
    )
    assert (produced.topic, produced.partition, produced.key, produced.value) == ("in.dlq", 2, b"\xff", b"\x00\xff")
    assert produced.headers[:2] == (("h", b"1"), ("h", b"2"))
    context = dict(produced.headers[2:])
    assert all(value.isascii() for value in context.values())
    assert len(context.pop("tentalis.dlq.error-message")) == 1024
    assert context == {
        "tentalis.dlq.original-topic": b"in",
        "tentalis.dlq.original-partition": b"2",
        "tentalis.dlq.original-offset": b"41",
        "tentalis.dlq.original-timestamp": b"1700000000123",
        "tentalis.dlq.consumer-group": b"app",
        "tentalis.dlq.error-class": b"ValueError",
        "tentalis.dlq.error-stage": b"decode",
        "tentalis.dlq.attempts": b"2",
        "tentalis.dlq.app-version": b"0.1",
        "tentalis.dlq.failed-at": b"1970-01-01T00:00:00.000+00:00",
    }


def test_a_tombstone_stays_one_in_the_dead_letters() -> None:
    record = LogRecord("in", 0, 0, 0, None, b"", tombstone=True)
    produced = letter(Dead.of(record, "decode", ValueError("")), group="a", attempts=1, version="1", failed_at=0.0)
    assert (produced.key, produced.value) == (None, None)
    assert dict(produced.headers)["tentalis.dlq.error-message"] == b"ValueError('')"


def records(count: int) -> list[LogRecord]:
    return [LogRecord("in", 0, offset, 0, f"k{offset}", b"") for offset in range(count)]


def dead(batch: list[LogRecord]) -> list[Dead]:
    return [Dead(r, "decode", "bad", "ValueError") for r in batch]


def test_a_run_of_failures_stops_and_a_handful_does_not() -> None:
    limits = DeadLetterLimits()
    batch = records(110)
    check(limits, batch, dead(batch[:100]))
    with pytest.raises(TooManyDead, match=r"101 records in a row could not be processed \(limit 100\)"):
        check(limits, batch, dead(batch[:101]))


def test_a_run_of_failures_of_one_key_quarantines_that_key() -> None:
    limits = DeadLetterLimits(run=100, ratio=0.5, window=1000)
    batch = [LogRecord("in", 0, offset, 0, "bad", b"") for offset in range(5000)]
    check(limits, batch, dead(batch))
    assert limits.quarantined == {"bad"}
    others = [LogRecord("in", 0, 5000 + offset, 0, f"k{offset % 6}", b"") for offset in range(120)]
    with pytest.raises(TooManyDead, match="in a row"):
        check(limits, others, dead(others))


def test_a_quarantine_ends_when_the_window_has_moved_on() -> None:
    limits = DeadLetterLimits(run=5, ratio=0.5, window=20)
    bad = [LogRecord("in", 0, offset, 0, "bad", b"") for offset in range(9)]
    check(limits, bad, dead(bad))
    good = [LogRecord("in", 0, 100 + offset, 0, "good", b"") for offset in range(21)]
    check(limits, good, [])
    assert limits.quarantined == frozenset()


def test_a_ratio_of_failures_stops_once_the_window_is_full() -> None:
    limits = DeadLetterLimits(run=10, ratio=0.5, window=20)
    batch = records(40)
    check(limits, batch, dead(batch[::2]))
    with pytest.raises(TooManyDead, match=r"11 of the last 20 records could not be processed \(limit 50%\)"):
        check(limits, batch, dead([r for r in batch if r.offset % 3]))
