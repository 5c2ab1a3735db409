"""Properties of the join over logs that nobody would write: against an oracle, and against its own undisturbed self.

The invariants have the letters that docs/concepts/join.md gives them: (a) a pair in time is emitted once, (b) what is
joined never times out, (c) the order of arrival within lateness does not matter, (d) state is bounded, (e) the same log
gives the same bytes. Logs are short and dense: few tasks, few samples, times around every boundary, repetitions,
strangers, contradictions, rubbish.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from schemas import topics
from schemas.records import HintKind, Outcome, Record, Sampling, Source, Status, TaskHead, TokenSpan
from schemas.tensors import float32_bytes
from streams.apps.join.processor import JoinProcessor
from streams.runtime.processor import DamagedState, LogRecord
from tests.support.join_oracle import Oracle
from tests.support.join_support import (
    CODEC,
    LIMITS,
    PARTITION,
    START,
    Cut,
    Disk,
    Partitioned,
    Written,
    alive,
    drive,
    forget,
    head,
    hint,
    open_,
    record_at,
    sample,
    score,
    tick,
    worker,
)

# More for a long search: TENTALIS_TEST_EXAMPLES=20000 pytest tests/unit/streams/apps/test_join_property.py
EXAMPLES = int(os.environ.get("TENTALIS_TEST_EXAMPLES", "50"))
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"), JoinProcessor(CODEC).age)
    yield made
    made.close()


TASKS: dict[str, TaskHead] = {
    "a": head("a", n=1),
    "b": head("b", n=2, opd_window_ms=300),
    "c": head("c", n=1, opd=None),
    "d": head("d", n=2, rl=None, deadline_ms=400),
    "e": head("e", n=2, rl=Source.USER, opd=Source.USER, deadline_ms=400, opd_window_ms=5000),
    # Of these everything comes in time.
    "p": head("p", n=1, opd_window_ms=300),
    "q": head("q", n=3, opd_window_ms=300),
    # These contradict the task of the same name.
    "b'": head("b", n=3, opd_window_ms=300),
    "c'": head("c", n=1),
}
POLICIES = (None, None, "assistant", "another")
"""What a request to forget is narrowed to."""
STEPS = (0, 0, 0, 1, 5, 5, 5, 40, 99, 100, 101, 201, 300, -50, -500)
LEAPS = (1000, 1001, 5001, 7000)

Spec = tuple[Any, ...]


@functools.cache
def record_of(spec: Spec) -> Record:
    """The record that a spec stands for; the same spec is the same event."""
    what, name, *rest = spec
    task = TASKS[name]
    match what:
        case "tick":
            return tick()
        case "forget":
            whom, policy = rest
            asked: dict[str, Any] = {"user": {"user_id": f"user-{task.task_id}"}, "before": {"before": START + 500}}
            return forget(**asked.get(whom, {}), policy=policy)
        case "open":
            return open_(task, START + rest[0], since(rest[1]))
    index, result, stranger, variant, at, appended = rest
    terms = task.terms
    named = terms.rl if what == "score" else terms.opd
    source = Source.OPERATOR if stranger or named is None else named
    status = Status.FAILED if result == "failed" else Status.OK
    of = sample(task, index, result, status=status, n=5 if variant == "longer" else 4)
    if name in "bd":
        of = of.model_copy(update={"sampling": Sampling(top_p=0.9)})
    if variant == "forged":
        of = of.model_copy(update={"response_digest": "another"})
    ident = "/".join(map(str, (what, task.task_id, task.n_samples, of.sample_index, result, source.value, variant)))
    if what == "score":
        reward = {"first": 0.1, "second": -0.7, "third": 0.2, "fourth": 0.3}.get(variant)
        made = score(of, reward, at=START + at, source=source, id=ident, task_at=since(appended))
        steps = {"step_scores": float32_bytes([at / 1000]), "step_spans": (TokenSpan(start=index, end=3),)}
        graded = {"components": {"explicit": reward}} if stranger and variant in ("first", "second") else {}
        return made.model_copy(update=steps | graded)
    kind = {"first": HintKind.ACCEPTED, "second": HintKind.REJECTED, "unknown": HintKind.NONE}.get(
        variant, HintKind.ACCEPTED
    )
    return hint(of, kind, at=START + at, source=source, id=ident, task_at=since(appended))


def since(after: int | None) -> int | None:
    return None if after is None else START + after


@functools.cache
def encoded(spec: Spec) -> tuple[str, bytes]:
    record = record_of(spec)
    return record.key, CODEC.encode(topics.HALVES, record)


# Each strategy is made once, and choices that belong together are one: drawing was most of the time of these tests. The
# first of each is the simplest, to which a failing log is shrunk.
WHATS = st.sampled_from(
    [
        (what, odd)
        for odd in [False] * 29 + [True]
        for what in ["score"] * 7 + ["hint"] * 7 + ["open"] * 2 + ["tick"] * 2 + ["forget", "rubbish"]
    ]
)
"""The kind of record, and if a task is named by its contradiction."""
NAMES = {names: st.sampled_from(names) for names in ("abcde", "a", "ab", "bd", "ce", "be")}
LEAVING = st.sampled_from(["user", "before", "nobody"]), st.sampled_from(POLICIES)
ODD_NAMES = {"b": "b'", "c": "c'"}
HALVES = {
    n: st.sampled_from(
        [
            (index, odd, stranger, variant)
            for odd in [False] * 19 + [True]
            for stranger in [False] * 9 + [True]
            for variant in ["first"] * 8 + ["second", "unknown", "longer", "forged"]
            for index in range(n)
        ]
    )
    for n in range(1, 4)
}
"""Of a task of n samples: which one, if it is of another result than the first, from a stranger, and the variant."""
# Mostly opened within the last moments, sometimes as good as too old, or in the future.
OPENED = ["now"] * 9 + ["old", "too old", "future"]
FAITHFUL = st.sampled_from([(at, "first") for at in OPENED])
# When the task itself was appended: at the latest when the log first speaks of it. Some do not say.
SOMEHOW = st.sampled_from(
    [(at, task_at) for task_at in [None] * 3 + ["first"] * 9 + ["too old", "future"] for at in OPENED]
)


@st.composite
def specs(draw: Any, names: str, failing: str, now: int, known: dict[str, int], faithful: bool) -> Spec | None:
    what, odd = draw(WHATS)
    if what == "rubbish":
        return None
    name = draw(NAMES[names])
    if what == "tick":
        return what, name
    if what == "forget":
        return what, name, *map(draw, LEAVING)
    if odd:
        name = ODD_NAMES.get(name, name)
    first = known.setdefault(TASKS[name].task_id, known[""])
    moments = {"now": now // 200 * 200, "old": now - 900, "too old": now - 4700, "future": 10**9, "first": first}
    at, task_at = (moments.get(moment) for moment in draw(FAITHFUL if faithful else SOMEHOW))
    if what == "open":
        return what, name, at, task_at
    index, other, stranger, variant = draw(HALVES[TASKS[name].n_samples])
    result = "r2" if other else "failed" if name in failing else "r1"
    return what, name, index, result, stranger, variant, at, task_at


PAUSES = st.sampled_from(STEPS * 4 + LEAPS)
LENGTHS = {most: st.integers(1, most) for most in (40, 60)}
ANY_NAMES, FAILING = st.sampled_from([*NAMES]), st.sampled_from(["", "", "", "ad", "bc", "e"])


@st.composite
def logs(draw: Any, most: int = 40, faithful: bool = False) -> list[tuple[int, Spec | None]]:
    """(append time after START, spec or None for rubbish) each; offsets are the places in the list.

    `faithful`: every record says of its task when it was appended, and says the same, as scoring and hinting do.
    """
    names, failing = draw(ANY_NAMES), draw(FAILING)
    found: list[tuple[int, Spec | None]] = []
    known = {"": -(10**6)}  # stream time, and of each task that was named
    now = 0
    for _ in range(draw(LENGTHS[most])):
        now += draw(PAUSES)
        known[""] = max(known[""], now)
        found.append((now, draw(specs(names, failing, now, known, faithful))))
    return found


def records(log: list[tuple[int, Spec | None]], tail: int = 0) -> list[LogRecord]:
    found = []
    for offset, (after, spec) in enumerate(log):
        key, value = encoded(spec) if spec is not None else ("?", b"rubbish")
        found.append(LogRecord(topics.HALVES, PARTITION, offset, START + after, key, value))
    last = max((after for after, _ in log), default=0)
    for i in range(tail):
        found.append(record_at(len(found), last + 20_000 * (i + 1), tick()))
    return found


def records_of(written: Written) -> list[tuple[str, Record]]:
    """Returns the output in the oracle's form."""
    return [(key, CODEC.decode(value, topic=topic, partition=0, offset=0)) for topic, key, value in written.produced]


@QUICK
@given(logs(most=60))
def test_what_the_oracle_says(log: list[tuple[int, Spec | None]]) -> None:
    """All of them at once: same outputs in the same order, same dead letters, as the brute force over the same log."""
    oracle = Oracle(PARTITION, LIMITS.marker_ttl_ms, LIMITS.max_samples, LIMITS.forget_ttl_ms)
    ticks = records(log, tail=1)[len(log) :]
    oracle.fold(
        [(i, START + after, record_of(spec) if spec is not None else None) for i, (after, spec) in enumerate(log)]
        + [(record.offset, record.timestamp, tick()) for record in ticks]
    )
    written = Partitioned(records(log, tail=1)).run()
    for _, record in oracle.written:
        event(f"outcome {record.kind.value}" if isinstance(record, Outcome) else "rollout")
    assert records_of(written) == oracle.written
    assert [offset for offset, _ in written.dead] == oracle.dead


@QUICK
@given(logs(), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_batches_do_not_matter(log: list[tuple[int, Spec | None]], sizes: list[int]) -> None:
    """(e) Byte for byte the same outputs in the same order, and the same state, however the log is cut into batches."""
    whole, pieces = Partitioned(records(log)), Partitioned(records(log))
    assert whole.run().produced == pieces.run(sizes).produced
    assert whole.written.dead == pieces.written.dead
    assert alive(whole.start()) == alive(pieces.start())


cuts = st.builds(
    Cut,
    stage=st.integers(0, 4),
    kept=st.frozensets(st.integers(0, 7)),
    back=st.sampled_from([0, 0, 1, 3, 1000]),
    wakes=st.sampled_from([None, 0, 1, 3]),
)
ROUGH = st.lists(st.integers(1, 6), min_size=1, max_size=4), st.dictionaries(st.integers(0, 9), cuts, max_size=3)


@settings(QUICK, max_examples=2 * EXAMPLES)
@given(
    logs(),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.dictionaries(st.integers(0, 12), cuts, max_size=6),
)
def test_crashes_redelivery_and_zombies_do_not_matter(
    log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """(e) Flushes cut between and within outputs, state and commit, redelivery from any earlier offset, late flushes of
    workers thought dead: nobody can tell.

    Every write is one of the undisturbed run, byte for byte, and none is missing, so a key that has one value keeps it.
    The state ends up the same.
    """
    calm, rough = Partitioned(records(log, tail=0)), Partitioned(records(log, tail=0))
    calm.run()
    rough.run(sizes, plan)
    assert set(rough.written.produced) == set(calm.written.produced)
    assert {offset for offset, _ in rough.written.dead} == {offset for offset, _ in calm.written.dead}
    assert alive(rough.start()) == alive(calm.start())


@settings(QUICK, max_examples=max(1, EXAMPLES // 10))
@given(
    logs(), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.dictionaries(st.integers(0, 12), cuts, max_size=6)
)
def test_state_on_disk_is_the_same_state(
    disk: Disk, log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """(e) With the state in a database that outlives its worker: what is written is what it is in memory, and so is the
    state after every start, though a start reads the changelog only from where the database ends."""
    calm, rough, kept = Partitioned(records(log)), Partitioned(records(log)), Partitioned(records(log), disk=disk)
    calm.run()
    rough.run(sizes, plan)
    kept.run(sizes, plan)
    assert set(kept.written.produced) == set(calm.written.produced)
    assert kept.written.produced == rough.written.produced
    mine, theirs = kept.start(), rough.start()
    assert alive(mine) == alive(theirs)
    assert mine.partitions[PARTITION].markers == theirs.partitions[PARTITION].markers


@QUICK
@given(
    logs(), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.dictionaries(st.integers(0, 9), cuts, max_size=3)
)
def test_state_is_bounded(log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]) -> None:
    """(d) The changelog holds the clock, one header per task that is remembered, the halves that open tasks wait with,
    and the requests to forget.

    One batch later what is useless is gone; when every deadline and marker is over, only the clock is left.
    """
    partition = Partitioned(records(log))
    partition.run(sizes, plan)
    processor = partition.start()
    tail = records(log, tail=3)[len(log) :]
    again = record_at(len(log), max(after for after, _ in log), tick())
    for record in (again, *(LogRecord(r.topic, r.partition, r.offset + 1, r.timestamp, r.key, r.value) for r in tail)):
        before = processor.partitions[PARTITION]
        waiting = sum(
            (slot.score is not None) + (slot.hint is not None)
            for task in before._open.values()
            for slot in task.slots.values()
        )
        remembered, leavers = before.open_tasks + before.markers, len(before._kernel.forgotten)
        stages = partition._stages(drive(processor.process(PARTITION, [record])), [record])
        for stage in stages:
            partition._arrive(stage)
        partition._apply(stages)
        kinds = [key.partition("/")[0] for key in partition.store]
        if record is again:
            # The tick moved no time: what was there before is what must be there, and nothing else.
            assert (kinds.count("clock"), kinds.count("task"), kinds.count("half")) == (1, remembered, waiting)
            assert kinds.count("forget") == leavers
    assert kinds == ["clock"]


@QUICK
@given(logs())
def test_every_sample_of_an_opened_task_has_one_outcome(log: list[tuple[int, Spec | None]]) -> None:
    """(a) Within the memory of a task no outcome and no rollout is written twice, and no sample is left without."""
    short = [(max(0, min(after, 4900)), spec) for after, spec in log]
    written = Partitioned(records(short, tail=1)).run()
    keys = [(topic, key) for topic, key, _ in written.produced]
    assert len(keys) == len(set(keys))
    outcomes = written.outcomes
    for key, outcome in outcomes.items():
        if outcome.kind.value not in ("late", "superseded"):
            assert key == f"{outcome.head.task_id}/{outcome.sample_index}"
            for index in range(outcome.head.n_samples):
                assert f"{outcome.head.task_id}/{index}" in outcomes
    for rollout in written.rollouts.values():
        told = [outcome for outcome in outcomes.values() if outcome.rollout_id == rollout.rollout_id]
        assert [outcome.rollout_digest for outcome in told] == [rollout.digest]


@QUICK
@given(logs(most=60, faithful=True), *ROUGH)
def test_no_task_has_two_ends_however_late_something_comes(
    log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """(f) Opened as late as its first feedback may open it, closed and long forgotten, a task is not opened again."""
    partition = Partitioned(records(log, tail=1))
    produced = set(partition.run(sizes, plan).produced)
    for topic in (topics.OUTCOMES, topics.ROLLOUTS):
        keys = [key for written, key, _ in produced if written == topic and key.count("/") == 1]
        assert len(keys) == len(set(keys))


# Added up in another order, the rewards of first, third and fourth have another mean.
VARIANTS = (None, "first", "first", "third", "third", "fourth", "fourth", "second", "unknown")
Sample = tuple[str, int]


@st.composite
def in_time(draw: Any) -> dict[Sample, list[Spec]]:
    """The halves of a few samples, each at most once: none, one or both."""
    found: dict[Sample, list[Spec]] = {}
    for name in ("p", "q"):
        for index in range(TASKS[name].n_samples):
            variants = {what: draw(st.sampled_from(VARIANTS)) for what in ("score", "hint")}
            found[name, index] = [
                (what, name, index, "r1", False, variant, 0, 0) for what, variant in variants.items() if variant
            ]
    return found


@st.composite
def arrival(draw: Any, halves: dict[Sample, list[Spec]]) -> list[tuple[int, Spec | None]]:
    """An order in which they come, some of them again, all before anything is given up; the broker's clock may step
    back."""
    specs = [spec for half in halves.values() for spec in half]
    specs += draw(st.lists(st.sampled_from(specs), max_size=4)) if specs else []
    specs += [("open", name, 0, 0) for name in ("p", "q")]
    now, log = 0, []
    for spec in draw(st.permutations(specs)):
        now = min(290, now + draw(st.sampled_from([0, 0, 1, 40])))
        back = draw(st.sampled_from([0, 0, 0, 50])) if log else 0  # the first record is what the others are in time for
        log.append((now - back, spec))
    return log


@QUICK
@given(st.data(), in_time(), *ROUGH)
def test_a_pair_in_time_is_joined_once_and_never_times_out(
    data: st.DataObject, halves: dict[Sample, list[Spec]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """(a) and (b): one rollout of both halves, whatever is repeated, redelivered or cut; no other end."""
    partition = Partitioned(records(data.draw(arrival(halves)), tail=1))
    written = partition.run(sizes, plan)
    for (name, index), specs in halves.items():
        variants = {spec[0]: spec[5] for spec in specs}
        if len(variants) < 2 or variants["score"] == "unknown" or variants["hint"] in ("second", "unknown"):
            continue
        values = {(topic, key, value) for topic, key, value in written.produced if key.startswith(f"{name}/{index}")}
        assert len(values) == 2, "one outcome and one rollout, each with one value"
        rollout, outcome = written.rollouts[f"{name}/{index}"], written.outcomes[f"{name}/{index}"]
        assert (rollout.has_rl, rollout.has_opd, outcome.kind.value) == (True, True, "both")


@QUICK
@given(st.data(), in_time(), *ROUGH)
def test_the_order_of_arrival_within_lateness_does_not_matter(
    data: st.DataObject, halves: dict[Sample, list[Spec]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """(c) Shuffled and duplicated, the same halves make the same rollouts, digest included; only when and from which
    offsets is another."""

    def told(log: list[tuple[int, Spec | None]], *rough: Any) -> dict[str, Any]:
        written = Partitioned(records(log, tail=1)).run(*rough)
        apart: dict[str, Any] = {"event_time": 0, "provenance": ()}
        found: dict[str, Any] = {f"rollout {key}": r.model_copy(update=apart) for key, r in written.rollouts.items()}
        return found | {key: outcome.model_copy(update={"event_time": 0}) for key, outcome in written.outcomes.items()}

    assert told(data.draw(arrival(halves))) == told(data.draw(arrival(halves)), sizes, plan)


@QUICK
@given(logs(), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_nothing_due_is_left_after_a_record(log: list[tuple[int, Spec | None]], sizes: list[int]) -> None:
    """Nothing that is open is due at the clock's time: recovery finds a stale header by that."""
    processor = worker({})
    for record in records(log):
        drive(processor.process(PARTITION, [record]))
        state = processor.partitions[PARTITION]
        assert all(task.due >= state.time for task in state._open.values())


def test_a_deleted_header_that_a_zombie_writes_again_is_ignored() -> None:
    """A header deleted long ago, flushed again by a zombie after compaction took the deletion: no second outcome."""
    log: list[tuple[int, Spec | None]] = [
        (0, ("open", "a", 0, None)),
        *((at, ("tick", "a")) for at in (1001, 7000, 7001)),
    ]
    partition = Partitioned(records(log))
    partition.run([1])
    stale = next(entry for entry in partition.changelog if entry.key == "task/a")
    partition.changelog = [entry for entry in partition.changelog if entry.key != "task/a"] + [stale]
    n = len(partition.written.produced)
    partition.log += [record_at(4, 7002, tick()), record_at(5, 7003, tick())]
    partition.run([1])
    assert len(partition.written.produced) == n
    assert list(partition.recovered()) == [f"clock/{PARTITION}"]


def test_state_that_lost_records_is_refused() -> None:
    s = sample(head("a"))
    partition = Partitioned([record_at(0, 0, score(s))])
    partition.run()
    entries = {key: value for key, value in partition.recovered().items() if not key.startswith("half/")}
    with pytest.raises(DamagedState, match="task a holds a half that is missing from the changelog"):
        worker(entries)


def test_a_half_that_a_crash_left_behind_is_deleted_once_its_task_closed_without_it() -> None:
    s = sample(head("a"))
    partition = Partitioned([record_at(0, 0, score(s)), record_at(1, 1, hint(s)), record_at(2, 2, tick())])
    # The score alone got its half to the changelog; its successor folds score and hint in one batch.
    partition.run([1, 2, 1], {0: Cut(stage=2)})
    assert sorted(partition.recovered()) == [f"clock/{PARTITION}", "task/a"]


def test_a_half_that_a_crash_left_behind_is_not_deleted_under_its_successor() -> None:
    """A worker that found the half of another's cut batch stops before it folds that record, and wakes much later."""
    s = sample(head("a"))
    log = [record_at(0, 0, tick()), record_at(1, 0, score(s)), *(record_at(i, 0, tick()) for i in (2, 3))]
    partition = Partitioned([*log, record_at(4, 50, hint(s))])
    crash = {0: Cut(stage=2), 1: Cut(stage=1, wakes=3), 5: Cut(stage=0)}
    assert {key for key in partition.run([2, 1, 1, 1, 1, 1], crash).outcomes} == {"a/0"}
    assert partition.written.rollouts["a/0"].has_rl and partition.written.rollouts["a/0"].has_opd


def test_a_restart_knows_which_slots_are_closed() -> None:
    task = head("b", n=2)
    halves = [half for i in (0, 1) for half in (score(sample(task, i)), hint(sample(task, i)))]
    partition = Partitioned([record_at(i, i, half) for i, half in enumerate(halves)])
    partition.run([2, 1, 1, 1], {1: Cut(stage=0)})
    assert {outcome.event_time for outcome in partition.written.outcomes.values()} == {START + 3}


def test_a_restart_remembers_requests_to_forget() -> None:
    """The request is on the changelog and the clock is not: it comes again, and what follows is refused."""
    s = sample(head("a"))
    log = [record_at(0, 0, forget(user_id="user-a")), record_at(1, 1, score(s)), record_at(2, 2, hint(s))]
    partition = Partitioned(log)
    partition.run([1, 1, 1], {0: Cut(stage=2), 2: Cut(stage=0)})
    assert {outcome.kind.value for outcome in partition.written.outcomes.values()} == {"late"}
    assert not partition.written.rollouts
    assert f"forget/{PARTITION}/0" in partition.recovered()


def test_a_request_does_not_reach_what_came_before_it() -> None:
    """Of a batch that was cut the request got to the changelog, the task's header did not: the halves come again."""
    s = sample(head("a"))
    partition = Partitioned([record_at(0, 0, score(s)), record_at(1, 1, hint(s)), record_at(2, 2, forget(before=9**9))])
    partition.run([3], {0: Cut(stage=1, kept=frozenset({1}))})
    assert {outcome.kind.value for outcome in partition.written.outcomes.values()} == {"both"}


def test_halves_that_join_within_a_batch_never_reach_the_changelog() -> None:
    s = sample(head("a"))
    partition = Partitioned([record_at(0, 0, score(s)), record_at(1, 1, hint(s)), record_at(2, 2, tick())])
    partition.run([2, 1])
    assert [entry.key for entry in partition.changelog] == ["task/a", f"clock/{PARTITION}", f"clock/{PARTITION}"]


def test_a_restart_keeps_every_timer_in_its_place() -> None:
    tasks = [head("c", deadline_ms=900), head("b", deadline_ms=500), head("a", deadline_ms=300)]
    log = [*(record_at(i, 0, open_(task)) for i, task in enumerate(tasks)), record_at(3, 301, tick())]
    partition = Partitioned([*log, record_at(4, 501, tick()), record_at(5, 901, tick())])
    partition.run([3, 1, 1, 1, 1], {1: Cut(stage=0)})
    found = [(key, outcome.event_time - START) for key, outcome in partition.written.outcomes.items()]
    assert found == [("a/0", 301), ("b/0", 501), ("c/0", 901)]


def test_a_restart_forgets_every_marker_in_its_time() -> None:
    late, early = head("z", opd=None), head("a", opd=None)
    closing = [(0, open_(late)), (1, score(sample(early))), (900, score(sample(late)))]
    again = [(5002, score(sample(early), at=START + 5002, id="again")), (5003, tick()), (5004, tick())]
    partition = Partitioned([record_at(i, after, what) for i, (after, what) in enumerate([*closing, *again])])
    partition.run([3, 1, 1, 1], {1: Cut(stage=0)})
    assert "a/0/late/again" not in partition.written.outcomes, "the marker was gone, so the task opened anew"


def test_a_batch_that_is_known_changes_nothing() -> None:
    partition = Partitioned([record_at(0, 0, score(sample(head("a")))), record_at(1, 1, b"rubbish")])
    partition.run()
    effects = drive(partition.start().process(PARTITION, partition.log))
    assert (effects.outputs, effects.changes, effects.dead) == ([], [], [])
