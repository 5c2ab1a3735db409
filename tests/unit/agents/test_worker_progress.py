"""The offsets to commit while records end in any order and partitions come and go."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tentalis.agents.workers.progress import OffsetProgress
from tentalis.kafka.consumer import Stored


def at(offset: int, partition: int = 0) -> Stored:
    return Stored("t", partition, offset, 0, None, b"", ())


def owning(*partitions: int) -> OffsetProgress:
    progress = OffsetProgress()
    progress.assign(("t", p) for p in partitions)
    return progress


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 10**6))
def test_nothing_is_committed_past_what_is_not_done_and_in_the_end_all_is(gaps: list[int], seed: int) -> None:
    offsets = [sum(gaps[: i + 1]) + i for i in range(len(gaps))]  # rising, with holes, as compaction leaves them
    progress, rng = owning(0), random.Random(seed)
    for offset in offsets:
        assert progress.begin(at(offset))
    done: set[int] = set()
    committed = -1
    for offset in rng.sample(offsets, len(offsets)):
        progress.finish(at(offset))
        done.add(offset)
        for stored in progress.committable():
            assert stored.offset > committed
            committed = stored.offset
        assert all(o in done for o in offsets if o <= committed)
    assert committed == offsets[-1]


def test_a_record_handed_out_again_is_known() -> None:
    progress = owning(0)
    assert progress.begin(at(5))
    progress.revoke([("t", 0)])
    progress.assign([("t", 0)])
    assert not progress.begin(at(5)), "it is on its way already"
    progress.finish(at(5))
    assert [s.offset for s in progress.committable()] == [5]
    assert progress.begin(at(5)), "committed: a redelivery is new work"


def test_records_of_a_revoked_partition_are_not_committed() -> None:
    progress = owning(0, 1)
    for stored in (at(1), at(2, 1)):
        progress.begin(stored)
    progress.revoke([("t", 0)])
    assert not progress.owns(at(1)) and progress.owns(at(2, 1))
    progress.finish(at(1))
    progress.finish(at(2, 1))
    assert [(s.partition, s.offset) for s in progress.committable()] == [(1, 2)]


def test_a_queued_record_given_back_does_not_hold_up_the_rest() -> None:
    progress = owning(0)
    for offset in (1, 2):
        progress.begin(at(offset))
    progress.finish(at(1))
    progress.forget(at(2))
    assert [s.offset for s in progress.committable()] == [1]
    assert progress.committable() == []
