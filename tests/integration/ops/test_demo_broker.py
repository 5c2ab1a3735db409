"""The demo's watching and summing up on a real broker, with the stack's processes made up."""

import io
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Feedback, PolicyAck, PolicyUpdate, Source
from tentalis.agents.scenarios import make_scenario
from tentalis.cli.shared.output import OutputFormat, print_data
from tentalis.demo.play import DemoOptions, Show
from tentalis.demo.runs import RunKind, open_run
from tentalis.demo.watch import Interrupted, RunFailed
from tentalis.kafka.consumer import GroupConsumer
from tentalis.kafka.lag import consumer_lags, drain
from tentalis.kafka.offsets import commit_offsets, offset_ranges
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab
from tests.support.loop_records import ack, manifest, outcome, plan, promotion, result, step_result, task, update

pytestmark = pytest.mark.broker


class MadeUp:
    """A stand-in for the supervisor, with the states that a test gives."""

    def __init__(self) -> None:
        self.states = {"topics": "done", "manager": "running", "trainer": "done"}
        self.gone: dict[str, str] = {}

    def status(self) -> dict[str, dict[str, Any]]:
        return {name: {"state": state, "restarts": 0} for name, state in self.states.items()}

    def failure(self) -> str | None:
        return None

    def broken(self) -> dict[str, str]:
        return self.gone


class Played:
    """A run of two versions on the log, and a show of it."""

    def __init__(self, kafka: Kafka, unique: str, tmp_path: Path, *, terminal: bool = False, **options: Any) -> None:
        self.lab = Lab(kafka.bootstrap, unique)
        settings = self.lab.settings.model_copy(update={"home": tmp_path})
        scenario = make_scenario("assistant")
        self.run = open_run(tmp_path / "runs", RunKind("assistant", 1, "/m"), scenario, 0.0)
        # The run id is the test's own, whatever the folder is called: topics are shared among tests.
        self.run = type(self.run)(unique, self.run.folder, resumed=False)
        self.processes, self.stop, self.text = MadeUp(), threading.Event(), io.StringIO()
        self.show = Show(
            self.run,
            DemoOptions(steps=1, **options),
            scenario,
            settings,
            "http://127.0.0.1:9",  # nobody listens: the answers are left out
            self.processes,
            Console(file=self.text, width=200, markup=False, highlight=False, force_terminal=terminal),
            self.stop,
            {},  # no applications run, so there is nothing to wait for
        )
        self.tmp_path = tmp_path

    def put_run(self) -> None:
        name, put = self.lab.name, self.lab.put
        named = {"policy": name}
        put(topics.RUNS, manifest(name, steps=1).model_copy(update=named))
        for version, reward in ((1, 0.0), (2, 1.0)):
            published: PolicyUpdate = update(version, **named)
            acknowledged: PolicyAck = ack(version, policy=name)
            put(topics.POLICIES, published, promotion(version).model_copy(update=named))
            put(topics.POLICY_ACKS, acknowledged)
            for number in range(3):
                of = task(f"{name}-{version}-{number}", run_id=name, metadata={"round": str(version - 1)}, **named)
                put(topics.TASKS, of)
                for index in range(of.n_samples):
                    answer = result(of, index, version=version)
                    put(topics.RESULTS, answer)
                    put(topics.OUTCOMES, outcome(of, index, version=version, reward=reward))
                    put(topics.FEEDBACK, self.feedback(answer))
            if version == 1:
                put(topics.BATCHES, plan(1, [], name), step_result(1, 2, name))

    def feedback(self, answer: Any) -> Feedback:
        return Feedback(
            feedback_id=derived_id("feedback", answer.result_id),
            event_time=1,
            task_id=answer.task.task_id,
            sample_index=answer.sample_index,
            source=Source.USER,
            text="That was too long.",
            result=answer,
        )

    def playing(self) -> threading.Thread:
        self.raised: list[BaseException] = []

        def run() -> None:
            try:
                self.show.play()
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def test_a_run_is_followed_to_its_end_and_summed_up_as_json(
    kafka: Kafka, unique: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(kafka, unique, tmp_path, emit=partial(print_data, OutputFormat.JSON))
    thread = played.playing()
    played.put_run()
    eventually(lambda: played.show.stats.outcomes.total() == 12, 30)
    assert thread.is_alive(), "it goes on until the manager is done"
    played.processes.states["manager"] = "done"
    thread.join(60)
    assert not thread.is_alive() and played.raised == []
    assert played.show.concluded and (played.run.folder / "finished").exists()
    said = json.loads(capsys.readouterr().out)
    assert said["run_id"] == unique and said["steps"] == 1
    assert [(v["version"], v["mean"], v["n"]) for v in said["reward_by_version"]] == [(1, 0.0, 6), (2, 1.0, 6)]
    assert (said["first_quarter"]["mean"], said["last_quarter"]["mean"]) == (0.0, 1.0)
    assert said["p_value"] == pytest.approx(1 / 20)
    report = (tmp_path / "reports" / unique / "report.html").read_text(encoding="utf-8")
    assert "The model server did not answer." in report and "12, 12 of them complaints" in report
    assert "step 1/1" in played.text.getvalue()


def test_the_summary_for_people(kafka: Kafka, unique: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = Played(kafka, unique, tmp_path, terminal=True)
    played.put_run()
    played.processes.states["manager"] = "done"
    played.playing().join(60)
    assert played.raised == []
    out = capsys.readouterr().out
    for part in (f"tentalis replay {unique}", "tentalis up", "First quarter", "report.html"):
        assert part in out
    live = played.text.getvalue()
    assert "reward by version" in live and "acknowledged" in live


def test_a_failed_process_ends_it_with_its_log(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    played = Played(kafka, unique, tmp_path)
    thread = played.playing()
    played.processes.gone = {"aggregation": "is dispensable", "join": "crash loop. Its log:\nValueError: boom"}
    thread.join(30)
    assert isinstance(played.raised[0], RunFailed) and "boom" in str(played.raised[0])
    assert not (played.run.folder / "finished").exists()


@pytest.mark.parametrize("waiting_for", ["topics", "manager"])
def test_ctrl_c_ends_it_at_any_time(kafka: Kafka, unique: str, tmp_path: Path, waiting_for: str) -> None:
    played = Played(kafka, unique, tmp_path)
    played.processes.states[waiting_for] = "waiting"
    thread = played.playing()
    played.stop.set()
    thread.join(30)
    assert isinstance(played.raised[0], Interrupted) and not played.show.concluded


def test_consumer_lag_is_what_is_not_committed(kafka: Kafka, unique: str) -> None:
    lab = Lab(kafka.bootstrap, unique)
    group = f"tentalis-{unique}"
    lab.put(topics.TASKS, *(task(f"{unique}-{i}", run_id=unique) for i in range(20)))
    ranges = offset_ranges(lab.settings, topics.TASKS)
    consumer = GroupConsumer(lab.settings, group, [topics.TASKS])
    read: list[Any] = []
    n_records = sum(end - start for start, end in ranges.values())  # those of earlier tests too
    eventually(lambda: read.extend(consumer.poll(0.5)) or len(read) >= n_records, 30)
    consumer.commit(read)
    consumer.close()
    groups = {group: (topics.TASKS,)}
    assert consumer_lags(lab.settings, groups)[group] == 0
    assert drain(lab.settings, groups, threading.Event(), timeout=10)
    lab.put(topics.TASKS, *(task(f"{unique}-{i}", run_id=unique) for i in range(20)))
    assert consumer_lags(lab.settings, groups)[group] == 20
    assert not drain(lab.settings, groups, threading.Event(), timeout=1)
    assert consumer_lags(lab.settings, {f"{group}-unheard-of": (topics.TASKS,)}) == {}


def test_consumer_lag_counts_partitions_without_a_commit(kafka: Kafka, unique: str) -> None:
    lab = Lab(kafka.bootstrap, unique)
    group = f"tentalis-{unique}"
    lab.put(topics.TASKS, *(task(f"{unique}-{i}", run_id=unique) for i in range(20)))
    ranges = offset_ranges(lab.settings, topics.TASKS)
    commit_offsets(lab.settings, group, {(topics.TASKS, 0): ranges[0][1]})
    uncommitted = sum(end - start for partition, (start, end) in ranges.items() if partition != 0)
    assert uncommitted > 0
    assert consumer_lags(lab.settings, {group: (topics.TASKS,)}) == {group: uncommitted}
