"""Feedback that names its task and no more: the rules of docs/concepts/feedback.md, one by one."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from schemas import topics
from schemas.records import HintKind, Opens, Polarity, Result, Source
from streams.fold import pairing as pairing_module
from streams.fold.hashing import id_hash
from streams.fold.pairing import BatchTooLarge
from streams.fold.recent_results import OffsetRef, RecentResults
from streams.runtime.processor import LogRecord
from tentalis.service.metrics import Exporter
from tests.support.pairing_support import HORIZON, PARTITION, Broker, Logs, Worker, bare, result
from tests.support.stream_records import make_feedback, make_result, make_task, read


def told(kind: str, *story: tuple[Any, int]) -> Broker:
    """A worker reads records in this order, one by one."""
    broker = Broker(kind)
    worker = Worker(broker)

    async def live() -> None:
        for record, at in story:
            topic = topics.RESULTS if isinstance(record, Result) else topics.FEEDBACK
            broker.logs.put(topic, record, at)
            await worker.batch(topic, 1)
            worker.flush()
            while await worker.timer():
                worker.flush()

    asyncio.run(live())
    return broker


def halves(broker: Broker) -> list[Any]:
    return [half for output in broker.outputs if hasattr(half := read(output), "sample")]


def spoken_of(broker: Broker) -> list[str]:
    return [half.sample.result_id for half in halves(broker)]


@pytest.mark.parametrize("kind", ["scoring", "hinting"])
def test_either_order_gives_the_same_bytes(kind: str) -> None:
    feedback, answer = bare("a", 0, "f"), result("a", 0)
    behind = told(kind, (answer, 100), (feedback, 200))
    before = told(kind, (feedback, 200), (answer, 201))
    again = told(kind, (make_feedback(answer, feedback_id="f", polarity=Polarity.POSITIVE), 200))
    assert behind.outputs == before.outputs == again.outputs
    assert spoken_of(behind) == [answer.result_id]


def test_feedback_that_opens_a_task_opens_it_when_it_was_appended() -> None:
    broker = told("scoring", (bare("a", 0, "f"), 200), (result("a", 0), 300))
    opened, score = (read(output) for output in broker.outputs)
    assert opened.task_at == score.task_at == make_result().opened_at
    assert opened.opened_at == score.opened_at == 200 and opened.head.terms.opens is Opens.FIRST_FEEDBACK


def test_feedback_on_the_whole_task_is_for_every_sample_also_for_those_to_come() -> None:
    first, second, rerun = result("a", 0), result("a", 1), result("a", 1, answer=2)
    broker = told("hinting", (first, 100), (bare("a", None, "f"), 200), (second, 300), (rerun, 400))
    assert spoken_of(broker) == [first.result_id, second.result_id]
    assert {half.kind for half in halves(broker)} == {HintKind.NONE}
    over = told("hinting", (first, 100), (bare("a", None, "f"), 200), (result("b", 0), 201 + HORIZON))
    assert not over.given_up and len(over.outputs) == 1


def test_feedback_on_a_sample_with_several_results_is_about_the_first() -> None:
    first, rerun = result("a", 0), result("a", 0, answer=2)
    assert spoken_of(told("scoring", (first, 1), (rerun, 2), (bare("a", 0, "f"), 3))) == [first.result_id]
    assert spoken_of(told("scoring", (bare("a", 0, "f"), 1), (first, 2), (rerun, 3))) == [first.result_id]


@pytest.mark.parametrize(("apart", "halves_made"), [(HORIZON, 1), (HORIZON + 1, 0)])
def test_the_horizon_holds_both_ways(apart: int, halves_made: int) -> None:
    feedback, answer = bare("a", 0, "f"), result("a", 0)
    assert len(halves(told("hinting", (feedback, 100), (answer, 100 + apart)))) == halves_made
    assert len(halves(told("hinting", (answer, 100), (feedback, 100 + apart)))) == halves_made


@pytest.mark.parametrize("sample", [0, 7, None])
def test_without_a_result_in_time_hinting_gives_it_up_and_scoring_forgets(sample: int | None) -> None:
    other = result("b", 0)
    story = ((bare("a", sample, "f"), 100), (other, 100 + HORIZON), (other, 101 + HORIZON))
    broker = told("hinting", *story)
    assert broker.given_up == broker.logs.topics[topics.FEEDBACK] and not broker.dead and not broker.outputs
    silent = told("scoring", *story)
    assert not silent.dead and not silent.outputs
    assert [key for key in silent.state() if key.startswith("feedback/")] == []


def test_feedback_on_an_idle_partition_is_given_up_when_time_goes_on_elsewhere() -> None:
    broker = Broker("hinting")
    worker = Worker(broker)

    async def live() -> None:
        broker.logs.put(topics.FEEDBACK, bare("a", 0, "f"), 100)
        await worker.batch(topics.FEEDBACK, 1)
        worker.flush()
        worker.app.restore(5, {})
        for at, gone in ((100 + HORIZON, 0), (102 + 2 * HORIZON, 1)):
            away = LogRecord(topics.RESULTS, 5, at, at, "z", b"")
            await worker.app.process(5, [away])
            assert not worker.app.due(PARTITION, {topics.FEEDBACK}), "results may be on their way"
            if await worker.timer():
                worker.flush()
            assert len(broker.given_up) == gone

    asyncio.run(live())


def test_feedback_with_its_result_costs_nothing() -> None:
    broker = told("hinting", *((make_feedback(result("a", 0), feedback_id=str(i)), 100 + i) for i in range(5)))
    assert len(broker.outputs) == 5
    assert not broker.changelog and not broker.logs.reads


def test_a_result_costs_a_reference_and_no_payload() -> None:
    large = make_result(make_task("a"), text="x" * 100_000)
    broker = told("hinting", (large, 100))
    (entry,) = broker.changelog
    assert entry.value is not None and len(entry.value) == 8 + 24


def test_a_batch_that_speaks_of_too_much_is_refused_as_a_whole_and_taken_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairing_module, "MOST_BYTES", 10)
    broker = Broker("scoring")
    broker.logs.put(topics.RESULTS, result("a", 0), 100)
    for name in "fg":
        broker.logs.put(topics.FEEDBACK, bare("a", 0, name), 101)
    worker = Worker(broker)

    async def live() -> None:
        await worker.batch(topics.RESULTS, 1)
        worker.flush()
        with pytest.raises(BatchTooLarge):
            await worker.batch(topics.FEEDBACK, 2)
        alone = Worker(broker)
        for _ in range(2):
            await alone.batch(topics.FEEDBACK, 1)
            alone.flush()

    asyncio.run(live())
    assert len(halves(broker)) == 2


def test_state_of_another_application_is_refused() -> None:
    for key, value in (("clock/3", b"x" * 20), ("results/1-2", b"short"), ("feedback/1", bytes(9))):
        with pytest.raises(ValueError, match="state entry"):
            RecentResults(HORIZON).restore({key: value})


def test_many_results_are_found_and_forgotten() -> None:
    recent = RecentResults(HORIZON)
    for offset in range(10_000):
        recent.read_results(offset)
        recent.read_feedback(offset)
        recent.add_result(OffsetRef(offset, offset, id_hash(str(offset // 4))))
        if offset % 100 == 99:
            recent.take_changes()
    assert 2 * HORIZON < recent.results <= 2 * HORIZON + 200
    asked = OffsetRef(0, 9_500, id_hash("2300"))
    assert [ref.offset for ref in recent.results_for(asked)] == [9200, 9201, 9202, 9203]
    assert recent.results_for(OffsetRef(0, 9_500, id_hash("100"))) == []


def test_the_sources_of_the_terms_hold_for_it_as_for_any_other() -> None:
    late = bare("a", 0, "f", source=Source.OPERATOR, score=0.5)
    (score,) = halves(told("scoring", (result("a", 0), 1), (late, 2)))
    assert score.source is Source.OPERATOR


def test_a_rerun_is_not_taken_for_the_first_when_the_first_was_long_ago() -> None:
    first, rerun, passing = result("a", 0), result("a", 0, answer=2), result("b", 0)
    broker = told(
        "scoring",
        (first, 100),
        (bare("a", None, "f"), 100 + 9 * HORIZON // 10),
        (passing, 100 + 6 * HORIZON // 5),
        (make_feedback(passing, feedback_id="g"), 100 + 6 * HORIZON // 5),
        (rerun, 100 + 3 * HORIZON // 2),
    )
    assert spoken_of(broker) == [first.result_id, passing.result_id]


def test_feedback_read_again_after_its_result_was_forgotten_is_no_dead_letter() -> None:
    broker = Broker("hinting")
    far = 100 + 5 * HORIZON
    passing = result("b", 0)
    for record, at in ((result("a", 0), 100), (passing, far)):
        broker.logs.put(topics.RESULTS, record, at)
    for each, at in ((bare("a", 0, "f"), 110), (make_feedback(passing, feedback_id="g"), far)):
        broker.logs.put(topics.FEEDBACK, each, at)

    async def live() -> None:
        worker = Worker(broker)
        for _ in range(2):
            await worker.batch(topics.RESULTS, 1)
            worker.flush()
        worker.commit()
        await worker.batch(topics.FEEDBACK, 2)
        worker.flush()  # and is killed before the commit
        assert [key for key in broker.state() if key.startswith("results/0")] == []
        again = Worker(broker)
        await again.timer()
        await again.batch(topics.FEEDBACK, 2)
        again.flush()
        while await again.timer():
            again.flush()

    asyncio.run(live())
    assert not broker.dead and len(set(spoken_of(broker))) == 2


class Sweeps(Logs):
    """Logs that count how often they are read, whatever for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, LogRecord]:
        self.calls += 1
        return await super().read(topic, partition, offsets)


MANY = 100


@pytest.mark.parametrize("kind", ["scoring", "hinting"])
def test_a_batch_of_feedback_without_its_results_makes_one_read(kind: str) -> None:
    logs = Sweeps()
    broker = Broker(kind, logs)
    for i in range(MANY):
        logs.put(topics.RESULTS, result(f"task {i}", 0), 100)
        logs.put(topics.FEEDBACK, bare(f"task {i}", 0, f"f{i}"), 101)
    worker = Worker(broker)

    async def live() -> None:
        await worker.batch(topics.RESULTS, MANY)
        worker.flush()
        await worker.batch(topics.FEEDBACK, MANY)
        worker.flush()

    asyncio.run(live())
    assert len(halves(broker)) == MANY
    assert logs.calls == 1


@pytest.mark.parametrize("kind", ["scoring", "hinting"])
def test_a_batch_of_results_for_which_feedback_waits_makes_few_reads(kind: str) -> None:
    logs = Sweeps()
    broker = Broker(kind, logs)
    for i in range(MANY):
        logs.put(topics.RESULTS, result(f"task {i}", 1), 100)
        logs.put(topics.FEEDBACK, bare(f"task {i}", 0, f"f{i}"), 101)
    for i in range(MANY):
        logs.put(topics.RESULTS, result(f"task {i}", 0), 102)
    worker = Worker(broker)

    async def live() -> None:
        await worker.batch(topics.RESULTS, MANY)
        worker.flush()
        await worker.batch(topics.FEEDBACK, MANY)
        worker.flush()
        before = logs.calls
        await worker.batch(topics.RESULTS, MANY)
        worker.flush()
        assert logs.calls <= before + 2

    asyncio.run(live())
    assert len(halves(broker)) == MANY


def test_feedback_that_is_given_up_together_is_read_in_one_go() -> None:
    logs = Sweeps()
    broker = Broker("hinting", logs)
    for i in range(MANY):
        logs.put(topics.FEEDBACK, bare(f"task {i}", 0, f"f{i}"), 100)
    logs.put(topics.RESULTS, result("elsewhere", 0), 101 + HORIZON)
    worker = Worker(broker)

    async def live() -> None:
        await worker.batch(topics.FEEDBACK, MANY)
        worker.flush()
        await worker.batch(topics.RESULTS, 1)
        worker.flush()

    asyncio.run(live())
    assert len(broker.given_up) == MANY
    assert logs.calls == 1


@pytest.mark.parametrize("kind", ["scoring", "hinting"])
def test_what_waits_and_what_is_remembered_is_measured(kind: str) -> None:
    broker = Broker(kind)
    worker = Worker(broker)
    exporter = Exporter(kind, app=worker.app.app_id)
    worker.app.measure(exporter)

    def measured(name: str) -> float | None:
        return exporter.registry.get_sample_value(f"tentalis_pairing_{name}", {"app": worker.app.app_id})

    async def live() -> None:
        for name in "abc":
            broker.logs.put(topics.FEEDBACK, bare(name, 0, name), 100)
        await worker.batch(topics.FEEDBACK, 3)
        worker.flush()
        assert (measured("waiting_feedback"), measured("remembered_results")) == (3, 0)
        for name in "ad":
            broker.logs.put(topics.RESULTS, result(name, 0), 102 + 2 * HORIZON if name == "d" else 100)
        await worker.batch(topics.RESULTS, 2)
        worker.flush()
        assert (measured("waiting_feedback"), measured("remembered_results")) == (0, 2)

    asyncio.run(live())
    if kind == "hinting":
        assert exporter.registry.get_sample_value("tentalis_hinting_hints_total", {"kind": "none"}) == 1
        assert exporter.registry.get_sample_value("tentalis_hinting_hints_total", {"kind": "accepted"}) == 0


def test_records_that_one_read_leaves_out_are_read_by_the_next() -> None:
    class Short(Sweeps):
        """Loses the first result, and is full after two records."""

        async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Any:
            found = await super().read(topic, partition, sorted(offsets)[:2])
            return {offset: None if offset == 0 else record for offset, record in found.items()}

    logs = Short()
    broker = Broker("scoring", logs)
    for i in range(5):
        logs.put(topics.RESULTS, result(f"task {i}", 0), 100)
        logs.put(topics.FEEDBACK, bare(f"task {i}", 0, f"f{i}"), 101)
    worker = Worker(broker)

    async def live() -> None:
        for topic in (topics.RESULTS, topics.FEEDBACK):
            await worker.batch(topic, 5)
            worker.flush()

    asyncio.run(live())
    assert spoken_of(broker) == [result(f"task {i}", 0).result_id for i in range(1, 5)]
    assert logs.calls == 3
