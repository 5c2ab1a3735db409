"""Scoring, hinting and aggregation on a real broker: what is valid goes through, the rest are dead letters."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import (
    Feedback,
    Hint,
    HintKind,
    MetaSignal,
    Open,
    Outcome,
    OutcomeKind,
    Polarity,
    Record,
    Result,
    Score,
    Source,
    Terms,
)
from schemas.tensors import float32_view
from streams.runtime.processor import LogRecord
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.partitioner import partition_of
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.rewards.moments import combine
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support.apps_lab import Apps
from tests.support.model_server import model_server
from tests.support.stream_records import make_feedback, make_result, make_task, malformed, unchecked

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]


@pytest.fixture(params=["memory", pytest.param("rocksdb", marks=pytest.mark.long)])
def apps(own_broker: EmbeddedBroker, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Apps]:
    with Apps(Settings(bootstrap=own_broker.bootstrap), tmp_path, request.param) as apps:
        yield apps


@pytest.fixture
def model() -> Iterator[tuple[int, Callable[[], object]]]:
    """A free port, and what starts the model server on it."""
    port = free_port()
    with ExitStack() as running:
        yield port, lambda: running.enter_context(model_server(port))


TASKS = 30
COMPLAINT = "That was too long: please answer in one sentence."


def outcome(index: int, at: int) -> Outcome:
    return Outcome(
        outcome_id=f"o{index}",
        outcome_key=f"t{index}/0",
        event_time=at,
        kind=OutcomeKind.RL,
        head=make_task(f"t{index}").head,
        sample_index=0,
        worker_id="w1",
        reward=index / TASKS,
    )


def malformed_records(at: int) -> dict[str, list[LogRecord]]:
    """Per input topic records of every kind of malformation."""
    moon = make_task("moon", environment="moon")
    good: dict[str, Record] = {
        topics.TASKS: make_task("bad"),
        topics.RESULTS: make_result(make_task("bad")),
        topics.FEEDBACK: make_feedback(make_result(make_task("bad"))),
        topics.OUTCOMES: outcome(0, at),
    }
    worse: dict[str, list[Record]] = {
        topics.TASKS: [moon],
        topics.RESULTS: [make_result(moon), unchecked(make_result(), elapsed_s=float("nan"))],
        topics.FEEDBACK: [
            make_feedback(make_result(moon)),
            unchecked(make_feedback(), score=float("nan")),
        ],
        topics.OUTCOMES: [unchecked(outcome(0, at), reward=float("nan"))],
    }
    codec = make_codec(Settings())
    return {
        topic: [
            *malformed(topic, record).values(),
            *(LogRecord(topic, 0, 0, 0, each.key, codec.encode(topic, each)) for each in worse[topic]),
        ]
        for topic, record in good.items()
    }


def test_good_records_become_halves_and_signals_and_bad_ones_dead_letters(
    apps: Apps, model: tuple[int, Callable[[], object]]
) -> None:
    port, start_model = model
    at = now_ms()
    tasks = [make_task(f"t{i}") for i in range(TASKS)]
    results = [make_result(task, response=(10, 11, 12)) for task in tasks]
    complaints = [make_feedback(result, COMPLAINT if i % 2 else "", event_time=at) for i, result in enumerate(results)]
    bad = malformed_records(at)
    for topic, good in (
        (topics.TASKS, tasks),
        (topics.RESULTS, results),
        (topics.FEEDBACK, complaints),
        (topics.OUTCOMES, [outcome(i, at) for i in range(TASKS)]),
    ):
        apps.put(topic, *good[: TASKS // 2])
        for record in bad[topic]:
            apps.put_bytes(record)
        apps.put(topic, *good[TASKS // 2 :])
    elsewhere: dict[str, Record] = {
        topics.RESULTS: make_result(make_task("elsewhere")),
        topics.FEEDBACK: make_feedback(make_result(make_task("elsewhere")), COMPLAINT),
    }
    for topic, record in elsewhere.items():
        key, count = record.key.encode(), topics.table()[topic].partitions
        value, wrong = apps.codec.encode(topic, record), (partition_of(key, count) + 1) % count
        apps.publisher.send_bytes(topic, key, value, partition=wrong)
        bad[topic].append(LogRecord(topic, wrong, 0, 0, record.key, value))
    apps.publisher.flush()

    apps.start("scoring")
    apps.start("aggregation")
    apps.start("hinting", "--server", f"http://127.0.0.1:{port}")

    def scored() -> bool:
        return len(apps.read(topics.HALVES, Open)) >= TASKS and len(apps.read(topics.HALVES, Score)) >= TASKS

    apps.wait(scored)
    apps.end("scoring", kill=True)
    apps.start("scoring")
    start_model()  # until now hinting was waiting for it
    apps.wait(lambda: len(apps.read(topics.HALVES, Hint)) >= TASKS)

    opens = {each.open_id: each for each in apps.read(topics.HALVES, Open)}
    assert Counter(each.key for each in opens.values()) == Counter(task.task_id for task in tasks)
    scores = {each.score_id: each for each in apps.read(topics.HALVES, Score)}
    assert Counter(each.key for each in scores.values()) == Counter(task.task_id for task in tasks)
    assert {each.reward for each in scores.values()} == {1.0}
    hints = {each.hint_id: each for each in apps.read(topics.HALVES, Hint)}
    kinds = Counter((each.kind, each.key in {f"t{i}" for i in range(1, TASKS, 2)}) for each in hints.values())
    assert kinds == {(HintKind.ACCEPTED, True): TASKS // 2, (HintKind.NONE, False): TASKS // 2}
    for hint in hints.values():
        if hint.kind is HintKind.ACCEPTED:
            assert float32_view(hint.teacher_logprobs).tolist() == pytest.approx([0, 0, 0, -0.10, -0.11, -0.12])

    owners = {
        topics.TASKS: "scoring",
        topics.RESULTS: "scoring",
        topics.FEEDBACK: "hinting",
        topics.OUTCOMES: "aggregation",
    }
    for topic, owner in owners.items():
        expected = Counter((None if r.tombstone else r.value, f"tentalis-{owner}") for r in bad[topic])
        apps.wait(lambda topic=topic, expected=expected: set(apps.dead(topic)) == set(expected))  # type: ignore[misc]

    def combined() -> MetaSignal:
        newest = {}
        for stored in read_to_end(apps.settings, topics.META):
            newest[stored.key] = stored.decode(apps.codec)
        signals = [each for each in newest.values() if isinstance(each, MetaSignal)]
        assert signals
        return combine(signals)

    apps.wait(lambda: (combined().count, combined().feedback_count) == (TASKS, TASKS // 2))
    whole = combined()
    assert whole.mean_reward == pytest.approx(sum(i / TASKS for i in range(TASKS)) / TASKS)
    assert whole.outcomes == {"rl": TASKS} and whole.mean_feedback_score == 0.0

    apps.end("aggregation", kill=True)
    apps.start("aggregation")
    apps.put(topics.OUTCOMES, *(outcome(i, at) for i in range(TASKS)), outcome(TASKS, at))
    apps.wait(lambda: combined().count == TASKS + 1)
    for name in ("scoring", "hinting", "aggregation"):
        apps.end(name)


def named_only(result: Result, name: str, **fields: Any) -> Feedback:
    """Feedback that names the task of a result, and no more."""
    whole = make_feedback(result, feedback_id=name, polarity=Polarity.POSITIVE, **fields)
    return unchecked(whole, result=None)  # type: ignore[no-any-return]


def test_feedback_that_only_names_its_task_finds_its_result_in_either_order_through_kills(apps: Apps) -> None:
    terms = Terms(rl=Source.USER, opd=Source.USER)
    results = [make_result(make_task(f"t{i}", terms=terms)) for i in range(TASKS)]
    feedback = [named_only(result, f"f{i}") for i, result in enumerate(results)]
    lonely = named_only(make_result(make_task("nobody", terms=terms)), "lonely")

    def start(horizon_s: int) -> None:
        apps.start("scoring", "--feedback-horizon", str(horizon_s))
        apps.start("hinting", "--feedback-horizon", str(horizon_s), "--server", "http://127.0.0.1:9")

    def kill() -> None:
        for name in ("scoring", "hinting"):
            apps.end(name, kill=True)

    def paired(kind: type[Record]) -> set[str | None]:
        return {half.feedback_id for half in apps.read(topics.HALVES, kind)}

    def reached(names: set[str]) -> bool:
        return paired(Score) == paired(Hint) == names

    moving = iter(range(10_000))

    def given_up() -> bool:
        # Log time goes on with the log only, whichever partition it is.
        apps.put(topics.RESULTS, make_result(make_task(f"time goes on {next(moving)}", terms=terms)))
        return "feedback lonely names task nobody and carries no result" in apps.log_of("hinting")

    apps.put(topics.FEEDBACK, lonely)
    start(1)
    apps.wait(given_up)
    kill()

    # Results first for a third, feedback first for a third.
    apps.put(topics.RESULTS, *results[:10])
    apps.put(topics.FEEDBACK, *feedback[10:20])
    start(600)
    apps.put(topics.FEEDBACK, *feedback[:10])
    apps.wait(lambda: reached({f"f{i}" for i in range(10)}))
    kill()
    # What was known is known after the kill: feedback that waited, and a result whose feedback comes only now.
    apps.put(topics.RESULTS, *results[10:])
    again = named_only(results[0], "again", author="somebody else")
    start(600)
    apps.put(topics.FEEDBACK, again, *feedback[20:])
    names = {f"f{i}" for i in range(TASKS)} | {"again"}
    apps.wait(lambda: reached(names))
    by_id = {half.score_id: half for half in apps.read(topics.HALVES, Score)}
    assert Counter(half.key for half in by_id.values()) == Counter([result.key for result in results] + ["t0"])
    assert not apps.dead(topics.FEEDBACK)
    for name in ("scoring", "hinting"):
        apps.end(name)
