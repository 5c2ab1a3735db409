"""`tentalis state rebuild join` on the halves of 20,000 tasks, as docs/operations/lost-topics.md shows it."""

import json
import random
import time
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import HintKind, Record, Task, sample_of
from streams.apps.join.processor import APP_ID, limits_of
from streams.runtime.rebuild import state_digest
from streams.runtime.state import ChangelogFold, entry_of
from streams.runtime.topic_guard import ChangelogReading
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.service import variables
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.integration.streams.test_topic_loss import CHANGELOG, recreate, refuses, start
from tests.support import ROOT
from tests.support.join_support import hint, needed, open_, score
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import eventually
from tests.support.loop_records import result, task
from tests.support.transcript import PageShell, ShownCommand, commands_of

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(1800)]

TASKS, SAMPLES = 20_000, 2
RUN = "rebuilt"
LIMITS = limits_of(round(1000 * variables.MARKER_TTL.default))


def halves_of(asked: Task, publisher: Publisher) -> list[Record]:
    """Writes a task with its results; its halves, not written."""
    publisher.send(topics.TASKS, asked)
    halves: list[Record] = []
    for index in range(asked.n_samples):
        answer = result(asked, index, event_time=asked.event_time, opened_at=asked.event_time)
        publisher.send(topics.RESULTS, answer)
        kind = HintKind.NONE if index else HintKind.ACCEPTED
        halves += [score(sample_of(answer), at=asked.event_time), hint(sample_of(answer), kind, at=asked.event_time)]
    return halves


def write_tasks(settings: Settings, tasks: int) -> list[Record]:
    """Writes tasks with none, some or all of their halves; the halves that are left, in an order of their own."""
    publisher, chance, later = Publisher(settings, "test", make_codec(settings)), random.Random(1), list[Record]()
    for number in range(tasks):
        asked = task(f"{RUN}-{number}", n=SAMPLES, run_id=RUN, event_time=now_ms())
        halves = halves_of(asked, publisher)
        chance.shuffle(halves)
        now = chance.randrange(len(halves) + 1)
        for record in (open_(asked.head, asked.event_time), *halves[:now]):
            publisher.send(topics.HALVES, record)
        later += halves[now:]
    publisher.flush()
    chance.shuffle(later)
    return later


def write_halves(settings: Settings, halves: list[Record]) -> None:
    publisher = Publisher(settings, "test", make_codec(settings))
    for record in halves:
        publisher.send(topics.HALVES, record)
    publisher.flush()


def join_all(settings: Settings, worker: JoinWorker) -> None:
    """Waits until a join has committed all halves that are there now, and ends it."""
    ends = end_offsets(settings, topics.HALVES)

    def caught_up() -> bool:
        assert worker.process.poll() is None
        done = committed_offsets(settings, APP_ID, [topics.HALVES])
        return all(done.get((topics.HALVES, partition), 0) >= end for partition, end in ends.items())

    eventually(caught_up, 600, 1.0, lambda: worker.log.read_text()[-2000:])
    assert worker.end() == 0


def state_on_log(settings: Settings) -> dict[int, dict[str, bytes]]:
    """Returns the state of each partition of the changelog, as a worker needs it at its start."""
    folds: dict[int, ChangelogFold] = {}
    for message in messages_to_end(settings, CHANGELOG):
        fold = folds.setdefault(message.partition(), ChangelogFold())
        place = (CHANGELOG, message.partition(), message.offset())
        ChangelogReading(fold).add(entry_of(*place, message.key(), message.value(), message.headers() or ()))
    return {partition: needed(fold.state(), LIMITS, partition) for partition, fold in sorted(folds.items())}


def digests(state: dict[int, dict[str, bytes]]) -> dict[int, str]:
    return {partition: state_digest(entries) for partition, entries in state.items()}


def test_the_state_of_a_long_run_is_rebuilt_to_the_byte(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    later = write_tasks(settings, TASKS)
    join_all(settings, start(settings, workers, tmp_path))
    before = state_on_log(settings)
    assert len(before) == topics.table().keyed_partitions
    recreate(settings, CHANGELOG)
    refuses(start(settings, workers, tmp_path))
    page = commands_of(ROOT / "docs" / "operations" / "lost-topics.md", "a-lost-changelog")
    env = {"TENTALIS_BOOTSTRAP": str(settings.bootstrap), "TENTALIS_HOME": str(tmp_path / "home"), "COLUMNS": "400"}
    with PageShell(tmp_path, env) as operator:
        *look, rebuild = page
        operator.follow(look)
        assert state_on_log(settings) == {}, "a dry run writes nothing"
        began = time.perf_counter()
        operator.follow([rebuild])
        seconds = time.perf_counter() - began
        after = state_on_log(settings)
        assert digests(after) == digests(before)
        write_halves(settings, later)
        join_all(settings, start(settings, workers, tmp_path))
        operator.follow([ShownCommand(f"tentalis verify {RUN}", ("no problems",), whole=False)])
    entries = sum(map(len, after.values()))
    print(json.dumps({"tasks": TASKS, "entries": entries, "seconds": round(seconds, 1)}))
