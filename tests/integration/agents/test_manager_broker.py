"""The manager on a real broker: a run played to its end, with the manager killed and begun again in between."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import Message, PolicySpan, Record, Task, result_id
from tentalis.agents.manager.process import Manager, ManagerOptions, scenario_of
from tentalis.agents.scenarios import make_scenario
from tentalis.agents.scenarios.prompts import PromptScenario
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab, running
from tests.support.loop_records import ack, manifest, outcome, plan, result
from tests.support.prompt_sets import prompts, written

pytestmark = pytest.mark.broker

STEPS, BATCH, N = 2, 4, 2


class World:
    """The manager's surroundings: answers tasks, decides promotions, trains when it can. Reads the log, as they do."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.answered: set[str] = set()
        self.fresh: list[str] = []
        self.trained = 0

    def put(self, topic: str, *records: Record) -> None:
        self.lab.put(topic, *records)

    def tasks(self) -> list[Task]:
        return self.lab.records(topics.TASKS, lambda t: t.run_id == self.lab.name)

    def feedback(self) -> list[Any]:
        return self.lab.records(
            topics.FEEDBACK, lambda f: f.result is not None and f.result.task.run_id == self.lab.name
        )

    def begin(self) -> None:
        self.put(
            topics.RUNS, manifest(self.lab.name, steps=STEPS, batch=BATCH).model_copy(update={"policy": self.lab.name})
        )
        self.put(topics.POLICY_ACKS, ack(1, policy=self.lab.name))

    def turn(self) -> bool:
        """Answers what is new, trains if there is a batch. Whether there was anything."""
        new = [t for t in self.tasks() if t.task_id not in self.answered]
        version = 1 + self.trained
        for of in new:
            for index in range(of.n_samples):
                text = "Too short." if index else "Cats purr because they are happy and feel safe with you."
                spans = (PolicySpan(start=0, policy=f"{self.lab.name}@v{version}"),)
                tokens = result(of, index).response_token_ids
                name = result_id(of.task_id, index, spans, tokens, text)
                self.put(topics.RESULTS, result(of, index, text=text, policy_spans=spans, result_id=name))
                self.put(topics.OUTCOMES, outcome(of, index, version=version))
                self.fresh.append(f"{of.task_id}/{index}")
            self.answered.add(of.task_id)
        if self.trained < STEPS and len(self.fresh) >= BATCH:
            self.trained += 1
            taken, self.fresh = self.fresh[:BATCH], self.fresh[BATCH:]
            self.put(topics.BATCHES, plan(self.trained, taken, self.lab.name))
            self.put(topics.POLICY_ACKS, ack(1 + self.trained, policy=self.lab.name))
            return True
        return bool(new)


def managing(manager: Manager, done: threading.Event) -> Any:
    async def body(stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                if await asyncio.to_thread(manager.step):
                    done.set()
                    return
        finally:
            manager.close()

    return body


@pytest.mark.parametrize("killed_after", [None, 1, 2])
def test_a_run_to_its_end(kafka: Kafka, unique: str, killed_after: int | None) -> None:
    lab = Lab(kafka.bootstrap, unique)
    world = World(lab)
    options = ManagerOptions(lab.name, "assistant", n_samples=N)
    done = threading.Event()

    def manager() -> Any:
        return managing(Manager(options, lab.settings, make_scenario("assistant")), done)

    turns = 0
    with running(manager()) as end:
        world.begin()
        while not done.is_set() and (killed_after is None or turns < killed_after):
            eventually(lambda: done.is_set() or world.turn(), 30)
            turns += 1
        end()
    if killed_after is not None:
        assert not done.is_set()
        world.turn()  # results and a step that nobody managed
        with running(manager()):
            eventually(lambda: world.turn() or done.is_set(), 30)
            eventually(lambda: (world.turn(), done.is_set())[1], 30)

    tasks = world.tasks()
    assert len(tasks) == len({t.task_id for t in tasks}) == (STEPS + 1) * BATCH // N
    assert len({t.messages for t in tasks}) == len(tasks), "no question twice"
    assert Counter(t.metadata["round"] for t in tasks) == {"0": 2, "1": 2, "2": 2}
    assert [t.metadata["served"] for t in tasks if t.metadata["round"] == "1"] == [f"{lab.name}@v2"] * 2
    assert all(t.terms.opd == "user" and t.user_id and t.messages[0].role == "user" for t in tasks)
    feedback = world.feedback()
    expected = {f"{t.task_id}/{i}" for t in tasks for i in range(N)}
    assert Counter(f"{f.task_id}/{f.sample_index}" for f in feedback) == dict.fromkeys(expected, 1)
    assert all((f.polarity == "negative") == bool(f.text) for f in feedback)
    assert {f.sample_index for f in feedback if f.text} >= {1}


def test_a_manager_whose_results_come_last_gives_them_feedback_before_it_ends(
    kafka: Kafka, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(kafka.bootstrap, unique)
    world = World(lab)
    manager = Manager(ManagerOptions(lab.name, "assistant", n_samples=N), lab.settings, make_scenario("assistant"))
    poll = manager._reader.poll
    monkeypatch.setattr(
        manager._reader, "poll", lambda wait: [pair for pair in poll(wait) if pair[0].topic != topics.RESULTS]
    )
    done = threading.Event()
    with running(managing(manager, done)):
        world.begin()
        eventually(lambda: (world.turn(), done.is_set())[1], 60)
    expected = {f"{t.task_id}/{i}" for t in world.tasks() for i in range(N)}
    assert {f"{f.task_id}/{f.sample_index}" for f in world.feedback()} == expected


def test_a_manager_issues_nothing_before_its_run_is_on_the_log(kafka: Kafka, unique: str) -> None:
    lab = Lab(kafka.bootstrap, unique)
    manager = Manager(ManagerOptions(lab.name, "assistant"), lab.settings, make_scenario("assistant"))
    eventually(lambda: manager.step() or manager._reader.caught_up, 30)
    assert not manager.step()
    assert lab.records(topics.TASKS, lambda t: t.run_id == lab.name) == []
    manager.close()


def test_the_prompts_of_a_folder_are_asked_with_their_lines_and_without_feedback(
    kafka: Kafka, unique: str, tmp_path: Path
) -> None:
    lab = Lab(kafka.bootstrap, unique)
    world = World(lab)
    written(tmp_path, prompts(7), held_out=1)
    options = ManagerOptions(lab.name, "assistant", n_samples=N, prompts=tmp_path)
    scenario = scenario_of(options, lab.settings)
    done = threading.Event()
    with running(managing(Manager(options, lab.settings, scenario), done)):
        world.begin()
        eventually(lambda: (world.turn(), done.is_set())[1], 60)
    tasks = world.tasks()
    asked = [scenario.question(lab.name, index) for index in range(len(tasks))]
    assert len(tasks) == 6
    assert {(t.messages, t.verifier) for t in tasks} == {(q.messages, q.verifier) for q in asked}
    assert {t.metadata["line"] for t in tasks} == {str(n) for n in range(1, 8)} - {
        str(prompt.line) for prompt in PromptScenario(tmp_path).held_out(1)
    }
    assert {t.metadata["prompts"] for t in tasks} == {PromptScenario(tmp_path).set.sha256}
    assert all((t.manager_id, t.user_id, t.terms.opd) == ("manager-prompts", None, None) for t in tasks)
    assert {t.metadata["round"] for t in tasks} == {"0", "1", "2"} and world.feedback() == []


def test_a_question_is_one_user_message() -> None:
    question = make_scenario("assistant").question("r", 0)
    assert question.messages == (Message(role="user", content=question.messages[0].content),)
