"""The records that `tentalis groups skip` skips, and the conditions under which it moves the group's offset."""

from hypothesis import given
from hypothesis import strategies as st

from tentalis.ops.groups.skip import Letter, PartitionSkip, all_before, next_bad

Kind = tuple[Letter, str | None]
GOOD, BAD = (Letter.NONE, None), (Letter.NONE, "bad magic")
DEAD, SKIPPED = (Letter.WRITTEN, "bad magic"), (Letter.SKIP, "bad magic")


def records(*kinds: Kind, start: int = 10) -> list[tuple[int, Letter, str | None]]:
    return [(start + number, *kind) for number, kind in enumerate(kinds)]


def bad(*kinds: Kind) -> PartitionSkip | None:
    return next_bad("t", 0, 10, records(*kinds))


def test_the_next_bad_records_are_skipped_up_to_the_next_good_one() -> None:
    assert bad(BAD, BAD, GOOD, BAD) == PartitionSkip("t", 0, 10, 10, 12, 2, "bad magic", 12)
    assert bad(BAD) == PartitionSkip("t", 0, 10, 10, 11, 1, "bad magic", 11), "up to the end of the log"
    assert bad() is None and bad(GOOD, GOOD) is None


def test_the_offset_stays_while_a_good_record_before_is_to_be_processed() -> None:
    assert bad(GOOD, BAD, BAD, GOOD) == PartitionSkip("t", 0, 10, 11, 13, 2, "bad magic", None)
    assert bad(GOOD, SKIPPED, SKIPPED, GOOD) is None


def test_a_second_skip_goes_on_behind_the_first_one() -> None:
    assert bad(GOOD, SKIPPED, GOOD, BAD, BAD) == PartitionSkip("t", 0, 10, 13, 15, 2, "bad magic", None)
    assert bad(SKIPPED, BAD, GOOD) == PartitionSkip("t", 0, 10, 11, 12, 1, "bad magic", 12)


def test_bad_records_before_the_place_where_the_process_stopped_are_skipped_too() -> None:
    assert bad(DEAD, GOOD, DEAD, GOOD, BAD, BAD, GOOD, BAD) == PartitionSkip("t", 0, 10, 10, 16, 4, "bad magic", 11)
    assert bad(DEAD, GOOD, DEAD, GOOD) == PartitionSkip("t", 0, 10, 10, 13, 2, "bad magic", 11)


def test_an_interrupted_skip_is_completed() -> None:
    assert bad(SKIPPED, SKIPPED, GOOD) == PartitionSkip("t", 0, 10, 10, 12, 0, "", 12)
    assert bad(SKIPPED, SKIPPED) == PartitionSkip("t", 0, 10, 10, 12, 0, "", 12)
    assert bad(SKIPPED, GOOD, BAD) == PartitionSkip("t", 0, 10, 12, 13, 1, "bad magic", 11)


def test_with_an_offset_good_records_are_skipped_too() -> None:
    skip = all_before("t", 0, 10, records(GOOD, SKIPPED, BAD), 13)
    assert skip == PartitionSkip("t", 0, 10, 10, 13, 2, "bad magic", 13, good=True)
    assert all_before("t", 0, 10, records(), 10) is None


@given(st.lists(st.sampled_from([GOOD, BAD, DEAD, SKIPPED]), max_size=12))
def test_repeated_skips_end_with_every_bad_record_skipped_and_no_good_one_passed(kinds: list[Kind]) -> None:
    log, position = list(kinds), 10
    for _ in range(20):
        skip = next_bad("t", 0, position, records(*log[position - 10 :], start=position))
        if skip is None:
            break
        chosen = [n for n in range(skip.first - 10, skip.until - 10) if log[n] in (BAD, DEAD)]
        assert len(chosen) == skip.records and (chosen or skip.commit is not None)
        for n in chosen:
            log[n] = SKIPPED
        if skip.commit is not None:
            assert skip.commit > position
            assert GOOD not in log[position - 10 : skip.commit - 10]
            position = skip.commit
    assert BAD not in log and DEAD not in log
