"""Aggregation: windows by event time, exact under redelivery, repetition, crashes and late records."""

import asyncio
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import topics
from schemas.records import MetaSignal, Outcome, OutcomeKind, Polarity
from streams.apps.aggregation.processor import Aggregation
from streams.runtime.processor import Change, Effects, LogRecord, applied_offset
from streams.runtime.state import ChangelogFold, StateStore, as_entries
from tentalis.rewards.moments import Moments, combine
from tests.support.stream_records import (
    CODEC,
    bare_feedback,
    make_feedback,
    make_result,
    make_task,
    malformed,
    on_log,
    read,
    unchecked,
)

MINUTE = 60_000
T0 = 1_700_000_040_000  # a multiple of a minute
PARTITION = 3


def outcome(index: int, reward: float | None = 0.5, at: int = T0, **fields: Any) -> Outcome:
    values: dict[str, Any] = {
        "outcome_id": f"o{index}",
        "outcome_key": f"t{index}/0",
        "event_time": at,
        "kind": OutcomeKind.RL,
        "head": make_task(f"t{index}").head,
        "sample_index": 0,
        "worker_id": "w1",
        "reward": reward,
    }
    return Outcome(**(values | fields))


def outcome_on_log(offset: int, reward: float | None = 0.5, at: int = T0, **fields: Any) -> LogRecord:
    timestamp = fields.pop("timestamp", at + 10)
    return on_log(topics.OUTCOMES, outcome(fields.pop("index", offset), reward, at, **fields), offset, timestamp)


def feedback_on_log(offset: int, score: float | None, at: int = T0, **fields: Any) -> LogRecord:
    result = make_result(make_task(f"t{offset}"))
    values = {"score": score, "event_time": at, "feedback_id": f"f{offset}"} | fields
    return on_log(topics.FEEDBACK, make_feedback(result, **values), offset, at + 10)


class Bench:
    """An application with its confirmed state, as the adapter keeps it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.store = StateStore()
        self.written: list[tuple[str, bytes | None, int]] = []
        self.start()

    def start(self) -> None:
        """A fresh process on the confirmed state."""
        self.app = Aggregation(CODEC, **self.options)
        self.app.restore(PARTITION, self.store.entries(PARTITION))

    def feed(self, *records: LogRecord, waves: int | None = None) -> list[MetaSignal]:
        """Processes a batch; `waves`: how many waves of its changes are confirmed before a crash, None for all."""
        effects = asyncio.run(self.app.process(PARTITION, records))
        self.confirm(effects, records[0].offset, waves)
        if waves is not None:
            self.start()
        return [read(output) for output in effects.outputs]

    def confirm(self, effects: Effects, first: int, waves: int | None) -> None:
        entries = as_entries(effects.changes[:waves], self.store.entries(PARTITION), first)
        self.store.apply(PARTITION, entries)
        self.written += [(entry.key, entry.value, entry.offset) for entry in entries]

    def state(self) -> dict[str, bytes]:
        return dict(self.store.entries(PARTITION))


# --- what is counted --------------------------------------------------------------------------------------------------


def test_a_window_has_count_mean_variance_and_kinds() -> None:
    bench = Bench()
    (signal,) = bench.feed(
        outcome_on_log(0, 1.0),
        outcome_on_log(1, 0.0, kind=OutcomeKind.BOTH),
        outcome_on_log(2, 0.5),
        outcome_on_log(3, None, kind=OutcomeKind.EMPTY),
    )
    assert (signal.manager_id, signal.worker_id) == ("m1", "w1")
    assert (signal.window_start, signal.window_ms) == (T0, MINUTE)
    assert (signal.count, signal.mean_reward) == (3, 0.5)
    assert signal.reward_variance == pytest.approx(statistics.pvariance([1.0, 0.0, 0.5]))
    assert signal.outcomes == {"both": 1, "empty": 1, "rl": 2}
    assert signal.event_time == T0 + 10


def test_environments_have_windows_of_their_own_and_combine_with_their_variances() -> None:
    maths = make_task("m", environment="math", verifier=None).head
    bench = Bench()
    by_environment = bench.feed(outcome_on_log(0, 1.0), outcome_on_log(1, -1.0, head=maths), outcome_on_log(2, 0.5))
    assert [(s.environment, s.count, s.mean_reward) for s in by_environment] == [("chat", 2, 0.75), ("math", 1, -1.0)]
    assert len({signal.key for signal in by_environment}) == 2
    whole = combine(by_environment)
    assert (whole.environment, whole.count) == ("", 3)
    assert whole.reward_variance == pytest.approx(statistics.pvariance([1.0, -1.0, 0.5]))
    assert combine(by_environment[:1]).environment == "chat"


def test_feedback_has_a_variance_that_combines() -> None:
    scores = [0.0, 0.25, 1.0, 0.5]
    bench = Bench()
    early = bench.feed(*(feedback_on_log(i, score) for i, score in enumerate(scores[:3])))
    late = bench.feed(feedback_on_log(3, scores[3], at=T0 + MINUTE))
    assert early[0].feedback_variance == pytest.approx(statistics.pvariance(scores[:3]))
    whole = combine([*early, *late])
    assert whole.feedback_count == 4 and whole.window_ms == 2 * MINUTE
    assert whole.feedback_variance == pytest.approx(statistics.pvariance(scores))


def test_windows_are_by_event_time_manager_and_worker() -> None:
    signals = Bench().feed(
        outcome_on_log(0, at=T0 + MINUTE - 1),
        outcome_on_log(1, at=T0 + MINUTE),
        outcome_on_log(2, at=T0, worker_id="w2", timestamp=T0 + MINUTE),
    )
    assert [(s.worker_id, s.window_start, s.count) for s in signals] == [
        ("w1", T0, 1),
        ("w1", T0 + MINUTE, 1),
        ("w2", T0, 1),
    ]


@pytest.mark.parametrize("kind", [OutcomeKind.LATE, OutcomeKind.SUPERSEDED])
def test_what_comes_beside_the_ordinary_outcome_is_counted_by_kind_only(kind: OutcomeKind) -> None:
    (signal,) = Bench().feed(outcome_on_log(0, 1.0), outcome_on_log(1, -1.0, kind=kind))
    assert (signal.count, signal.mean_reward, signal.outcomes) == (1, 1.0, {"rl": 1, kind.value: 1})


def test_feedback_and_outcomes_have_keys_of_their_own_and_meet_with_whoever_combines() -> None:
    bench = Bench()
    first = bench.feed(outcome_on_log(0, 1.0))
    graded = bench.feed(
        feedback_on_log(0, 0.25),
        feedback_on_log(1, None, polarity=Polarity.POSITIVE),
        feedback_on_log(2, None, polarity=Polarity.NONE),
    )
    whole = combine(newest(first, graded))
    assert (whole.count, whole.mean_reward, whole.outcomes) == (1, 1.0, {"rl": 1})
    assert (whole.feedback_count, whole.mean_feedback_score) == (2, 0.625)
    whole = combine(newest(first, graded, bench.feed(outcome_on_log(1, 0.0))))
    assert (whole.count, whole.feedback_count) == (2, 2)


def newest(*written: Sequence[MetaSignal]) -> list[MetaSignal]:
    """The newest signal of each key, as compaction leaves them."""
    return list({signal.key: signal for signals in written for signal in signals}.values())


def test_feedback_that_is_read_long_after_the_outcomes_of_its_window_leaves_them_as_they_are() -> None:
    bench = Bench()
    before = bench.feed(outcome_on_log(0, 1.0))
    bench.feed(outcome_on_log(1, at=T0 + 2 * 60 * MINUTE))
    whole = combine(newest(before, bench.feed(feedback_on_log(0, 0.25))))
    assert (whole.count, whole.mean_reward, whole.feedback_count) == (1, 1.0, 1)


def test_each_partition_has_keys_of_its_own_and_the_parts_combine() -> None:
    rewards = [1.0, 0.0, 0.25, 0.5, -1.0, 0.75, 1.0]
    parts, keys = [], set()
    for partition, group in enumerate((rewards[:1], rewards[1:4], rewards[4:])):
        app = Aggregation(CODEC)
        app.restore(partition, {})
        records = [outcome_on_log(i, reward) for i, reward in enumerate(group)]
        (output,) = asyncio.run(app.process(partition, records)).outputs
        keys.add(output.key)
        parts.append(read(output))
    assert keys == {f"m1/w1/chat/{T0}/{partition}/outcomes" for partition in range(3)}
    whole = combine(parts)
    assert (whole.count, whole.outcomes) == (7, {"rl": 7})
    assert whole.mean_reward == pytest.approx(statistics.fmean(rewards))
    assert whole.reward_variance == pytest.approx(statistics.pvariance(rewards))


def test_windows_combine_to_longer_ones() -> None:
    signals = Bench().feed(outcome_on_log(0, 1.0), outcome_on_log(1, 0.0, at=T0 + 2 * MINUTE))
    whole = combine(signals)
    assert (whole.window_start, whole.window_ms, whole.count, whole.mean_reward) == (T0, 3 * MINUTE, 2, 0.5)
    with pytest.raises(ValueError, match="one manager"):
        combine([*signals, signals[0].model_copy(update={"worker_id": "other"})])
    with pytest.raises(ValueError, match="none"):
        combine([])


@given(st.lists(st.lists(st.floats(-1, 1), max_size=8), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_moments_of_parts_are_moments_of_the_whole(parts: list[list[float]]) -> None:
    merged = Moments()
    for part in parts:
        moments = Moments()
        for value in part:
            moments = moments.add(value)
        merged = merged.merge(moments)
    values = [value for part in parts for value in part]
    assert merged.n == len(values)
    if values:
        assert math.isclose(merged.mean, statistics.fmean(values), abs_tol=1e-12)
        assert merged.variance is not None
        assert math.isclose(merged.variance, statistics.pvariance(values), abs_tol=1e-12)


# --- once -------------------------------------------------------------------------------------------------------------


def test_a_record_delivered_again_changes_nothing() -> None:
    bench = Bench()
    records = [outcome_on_log(i, i / 10) for i in range(6)]
    bench.feed(*records)
    before = bench.state()
    assert bench.feed(*records[2:]) == []
    assert bench.state() == before
    bench.start()
    (signal,) = bench.feed(*records[4:], outcome_on_log(6, 1.0))
    assert signal.count == 7


def test_a_record_produced_again_is_known_by_its_event_id() -> None:
    bench = Bench()
    bench.feed(outcome_on_log(0, 1.0, index=0))
    bench.start()
    assert bench.feed(outcome_on_log(1, 1.0, index=0)) == []
    assert bench.feed(outcome_on_log(2, 1.0, index=0), outcome_on_log(3, 0.0, index=1))[0].count == 2
    assert bench.app.duplicates == 2
    twice = Bench().feed(outcome_on_log(0, 1.0, index=0), outcome_on_log(1, 1.0, index=0))
    assert twice[0].count == 1


def test_the_offsets_of_the_two_topics_do_not_hide_each_other() -> None:
    bench = Bench()
    bench.feed(outcome_on_log(1_000, 1.0))
    assert bench.feed(feedback_on_log(0, 1.0))[0].feedback_count == 1
    assert bench.feed(feedback_on_log(0, 1.0)) == []
    assert bench.feed(outcome_on_log(1_001, 0.0))[0].count == 2


def stream() -> list[LogRecord]:
    """Outcomes of four hours in two topics' worth of trouble: repeated ids, late records, two workers."""
    records = []
    for i in range(40):
        at = T0 + i * 6 * MINUTE - (MINUTE * 90 if i % 9 == 8 else 0)
        records.append(
            outcome_on_log(
                i,
                (i % 5) / 4,
                at,
                index=i - 1 if i % 7 == 6 else i,
                worker_id=f"w{i % 2 if i % 7 != 6 else (i - 1) % 2}",
                timestamp=T0 + i * 6 * MINUTE,
            )
        )
    return records


def final(bench: Bench, batches: Sequence[Sequence[LogRecord]]) -> dict[tuple[str, int], MetaSignal]:
    found = {}
    for batch in batches:
        for signal in bench.feed(*batch):
            found[signal.worker_id, signal.window_start] = signal
    return found


def content(signals: dict[tuple[str, int], MetaSignal]) -> dict[tuple[str, int], Any]:
    return {key: (s.count, s.mean_reward, s.reward_variance, s.outcomes) for key, s in signals.items()}


@given(st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=40, deadline=None)
def test_batches_may_be_cut_anywhere(cuts: list[int]) -> None:
    records = stream()
    whole = Bench()
    expected = content(final(whole, [records]))
    edges = sorted({0, 40, *cuts})
    bench = Bench()
    parts = [records[a:b] for a, b in pairwise(edges)]
    assert content(final(bench, parts)) == expected
    assert {k: v for k, v in bench.state().items() if "seen" not in k} == {
        k: v for k, v in whole.state().items() if "seen" not in k
    }


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_a_crash_between_any_two_waves_and_a_redelivery_from_any_offset_lose_and_double_nothing(
    story: list[tuple[int, int, int]],
) -> None:
    records = stream()
    expected = content(final(Bench(), [records]))
    bench = Bench()
    found: dict[tuple[str, int], MetaSignal] = {}

    def feed(batch: Sequence[LogRecord], waves: int | None) -> None:
        for signal in bench.feed(*batch, waves=waves):
            found[signal.worker_id, signal.window_start] = signal

    committed = 0
    for size, waves, back in story:
        start = max(0, committed - back)
        batch = records[start : committed + size]
        if not batch:
            break
        feed(batch, waves)  # crashes: what comes next begins at the commit again
        feed(records[start : committed + size + 2], None)
        committed = min(committed + size + 2, len(records))
    if committed < len(records):
        feed(records[committed:], None)
    assert content(found) == expected


def test_a_worker_that_takes_over_has_the_last_word_after_a_predecessor_that_woke_up_late() -> None:
    bench = Bench()
    (early,) = bench.feed(outcome_on_log(0, 1.0))
    bench.feed(feedback_on_log(0, 0.5))
    (last,) = bench.feed(outcome_on_log(1, 0.0))
    on_topic = [last, early]  # the predecessor was frozen with its output in hand, and sent it when it was woken
    bench.start()
    assert bench.app.due(PARTITION, ())
    effects = asyncio.run(bench.app.expire(PARTITION))
    on_topic += [read(output) for output in effects.outputs]
    assert newest(on_topic)[0] == last and len(effects.outputs) == 2 and not effects.changes
    assert not bench.app.due(PARTITION, ())


def test_a_closing_window_has_the_last_word_after_a_predecessor_that_woke_up_after_the_take_over() -> None:
    bench = Bench(retention_ms=10 * MINUTE)
    (early,) = bench.feed(outcome_on_log(0, 1.0))
    (last,) = bench.feed(outcome_on_log(1, 0.0))
    on_topic = [last, early]  # and nothing more comes for this window
    on_topic += bench.feed(outcome_on_log(2, 0.5, at=T0 + 11 * MINUTE))
    closed, other = newest(on_topic)
    assert closed == last.model_copy(update={"event_time": closed.event_time})
    assert (other.window_start, other.count) == (T0 + 11 * MINUTE, 1)
    (other,) = bench.feed(outcome_on_log(3, 0.5, at=T0 + 11 * MINUTE))
    assert (other.window_start, other.count) == (T0 + 11 * MINUTE, 2)


def test_recovery_by_the_greatest_offset_gives_the_state_back() -> None:
    bench = Bench()
    for record in stream():
        bench.feed(record)
    fold = ChangelogFold()
    from streams.runtime.state import Entry

    for key, value, offset in bench.written:
        fold.add(Entry(key, value, offset))
    assert fold.state() == bench.state()
    assert all(applied_offset(value) >= 0 for value in bench.state().values())


# --- time -------------------------------------------------------------------------------------------------------------


def test_windows_past_retention_are_deleted_and_take_nothing_more() -> None:
    bench = Bench(retention_ms=10 * MINUTE)
    bench.feed(outcome_on_log(0, 1.0))
    assert any('"bucket"' in key for key in bench.state())
    bench.feed(outcome_on_log(1, 1.0, at=T0 + 11 * MINUTE))
    assert [key for key in bench.state() if str(T0) in key] == []
    assert len([key for key in bench.state() if '"seen"' in key]) == 1
    assert bench.feed(outcome_on_log(2, 0.0, at=T0, timestamp=T0 + 11 * MINUTE)) == []
    assert bench.app.late == 1


def test_a_record_is_in_time_until_the_moment_its_window_closes() -> None:
    bench = Bench(retention_ms=10 * MINUTE)
    bench.feed(outcome_on_log(0, 1.0))
    late = T0 + 11 * MINUTE
    assert bench.feed(outcome_on_log(1, 0.0, at=T0, timestamp=late - 1))[0].count == 2
    (closing,) = bench.feed(outcome_on_log(2, 0.0, at=T0, timestamp=late))
    assert (closing.count, bench.app.late) == (2, 1)


def test_the_brokers_clock_may_step_back() -> None:
    bench = Bench(retention_ms=10 * MINUTE)
    bench.feed(outcome_on_log(0, at=T0 + 20 * MINUTE))
    assert bench.feed(outcome_on_log(1, at=T0, timestamp=T0)) == []
    bench.start()
    assert bench.feed(outcome_on_log(2, at=T0, timestamp=T0)) == []


def test_an_event_from_the_future_is_taken_when_it_was_appended() -> None:
    (signal,) = Bench().feed(outcome_on_log(0, at=T0 + 10**12, timestamp=T0 + 5))
    assert signal.window_start == T0


def test_state_stays_bounded() -> None:
    bench = Bench(retention_ms=5 * MINUTE)
    sizes = []
    for i in range(200):
        bench.feed(outcome_on_log(i, 0.5, T0 + i * MINUTE))
        sizes.append(len(bench.state()))
    assert max(sizes) == max(sizes[:20]) and sizes[-1] <= 2 * 6 + 1


# --- dead letters -----------------------------------------------------------------------------------------------------


def test_malformed_outcomes_are_dead_letters_with_their_bytes_and_the_rest_goes_through() -> None:
    for name, record in malformed(topics.OUTCOMES, outcome(0)).items():
        app = Aggregation(CODEC)
        app.restore(PARTITION, {})
        effects = asyncio.run(app.process(PARTITION, [record, outcome_on_log(1)]))
        assert [dead.record for dead in effects.dead] == [record], name
        assert len(effects.outputs) == 1, name


def test_bad_values_and_unknown_environments_are_dead_letters() -> None:
    nan = on_log(topics.OUTCOMES, unchecked(outcome(0), reward=float("nan")))
    moon = on_log(topics.OUTCOMES, outcome(1, head=make_task("t1", environment="moon").head))
    app = Aggregation(CODEC)
    app.restore(PARTITION, {})
    effects = asyncio.run(app.process(PARTITION, [nan, moon]))
    assert [dead.record for dead in effects.dead] == [nan, moon] and not effects.changes and not effects.outputs


def test_malformed_feedback_is_left_to_hinting() -> None:
    app = Aggregation(CODEC)
    app.restore(PARTITION, {})
    bad = list(malformed(topics.FEEDBACK, make_feedback()).values())
    alone = on_log(topics.FEEDBACK, bare_feedback(polarity=Polarity.NEGATIVE))
    effects = asyncio.run(app.process(PARTITION, [*bad, alone]))
    assert not effects.dead and not effects.outputs and app.skipped.count == len(bad)
    assert app.bare == 1


def test_state_of_somebody_else_is_refused() -> None:
    for key in ("x", '["outcomes","what",1]', '["elsewhere","clock"]'):
        with pytest.raises(ValueError, match="is not a valid aggregation entry"):
            Aggregation(CODEC).restore(PARTITION, {key: b"\0" * 16})


def test_a_failed_batch_leaves_the_state_as_it_was() -> None:
    bench = Bench()
    bench.feed(outcome_on_log(0, 1.0))
    changes: list[list[Change]] = asyncio.run(bench.app.process(PARTITION, [outcome_on_log(1, 0.0)])).changes
    assert changes
    bench.app.revoke(PARTITION)
    bench.app.restore(PARTITION, bench.store.entries(PARTITION))
    assert bench.feed(outcome_on_log(1, 0.0))[0].count == 2
