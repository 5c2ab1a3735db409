"""The evidence on a served version: answers that the product recorded, and not those of a single user alone."""

from dataclasses import dataclass

import pytest

from schemas.records import RecordedBy, TaskHead
from tentalis.policies.guard_statistics import evidence_of_drop
from tentalis.policies.live import ServedAnswers
from tentalis.policies.live_windows import MAX_ANSWERS, PAIRED_TASKS, owner_of
from tests.support.trainer_lab import rollout
from tests.unit.policies.test_guardian import PAIRED, Speaker, guardian, log_of, promotion, said, version

HEAD = rollout().head


@dataclass(frozen=True)
class Asker:
    """Asks tasks, and the answers come back. `recorded_by`: the process that recorded them."""

    name: str
    recorded_by: RecordedBy = RecordedBy.GATEWAY
    run_id: str | None = None

    def ask(self, answers: ServedAnswers, number: int, length: int, reward: float, count: int = 24) -> None:
        for index in range(count):
            task_id = f"{self.name}-{number}-{length}-{index}"
            made = rollout(
                task_id,
                policy="assistant",
                version=number,
                prompt=(3, index),
                response=[7] * length,
                reward=reward,
                recorded_by=self.recorded_by,
            )
            head = made.head.model_copy(update={"user_id": self.name or None, "run_id": self.run_id})
            answers.apply(made.model_copy(update={"head": head}))


ANN, BEN, EVE = Asker("ann"), Asker("ben"), Asker("eve")


def rolled_back(answers: ServedAnswers) -> bool:
    """True if v2 falls below its guard; v1 was promoted before it."""
    log = log_of(PAIRED, version(0), version(1), said(1), promotion(1, "guarded", "s1"))
    log.apply(version(2), 10)
    log.apply(said(2), -1)
    log.apply(promotion(2, "guarded", "s2"), 11)
    return guardian(log, Speaker()).check_served(version(2), answers) is not None


@pytest.mark.parametrize("by", [RecordedBy.CLIENT, RecordedBy.UNKNOWN])
def test_answers_that_a_client_claims_to_be_of_a_version_are_no_evidence_on_it(by: RecordedBy) -> None:
    """A key with the scope `tasks` or `traces` may post results and turns, and names the version itself."""
    answers = ServedAnswers()
    for user in (ANN, BEN):
        user.ask(answers, 1, 20, 0.5)
        user.ask(answers, 2, 20, 0.5)
    for name in ("eve", "eva", "evi"):
        Asker(name, by).ask(answers, 2, 1, -1.0, 200)
    assert not rolled_back(answers)
    assert answers.evidence("assistant@v2").length == 20.0
    alone = ServedAnswers()
    Asker("eve", by).ask(alone, 2, 1, -1.0, 64)
    assert not rolled_back(alone)


@pytest.mark.parametrize(("length", "reward"), [(1, 0.5), (20, -1.0), (1, -1.0)])
def test_no_single_user_can_roll_a_version_back(length: int, reward: float) -> None:
    """Short answers (by `max_tokens`, or by what is asked for) and low rewards (by thumbs, or by rules that no answer
    satisfies) are in each client's hands."""
    answers = ServedAnswers()
    for user in (ANN, BEN, EVE):
        user.ask(answers, 1, 20, 0.5)
    ANN.ask(answers, 2, 20, 0.5)
    BEN.ask(answers, 2, 20, 0.5)
    EVE.ask(answers, 2, length, reward, 500)
    assert not rolled_back(answers)
    # Nor while the others sleep: they have asked the version before.
    asleep = ServedAnswers()
    for user in (ANN, EVE):
        user.ask(asleep, 1, 20, 0.5)
    EVE.ask(asleep, 2, length, reward, 500)
    assert not rolled_back(asleep)


def test_no_single_user_hides_a_fall_by_asking_much() -> None:
    answers = ServedAnswers()
    ANN.ask(answers, 1, 20, 0.5)
    BEN.ask(answers, 1, 20, 0.5)
    ANN.ask(answers, 2, 1, -1.0)
    BEN.ask(answers, 2, 1, -1.0)
    EVE.ask(answers, 2, 1, -1.0, 1000)
    assert rolled_back(answers)


@pytest.mark.parametrize(("length", "reward"), [(1, 0.5), (20, -1.0)])
def test_a_fall_that_several_users_see_is_one(length: int, reward: float) -> None:
    answers = ServedAnswers()
    for user in (ANN, BEN):
        user.ask(answers, 1, 20, 0.5, 48)
        user.ask(answers, 2, length, reward, 48)
    assert rolled_back(answers)


@pytest.mark.parametrize("name", ["", "ann"])
def test_the_only_user_of_a_policy_is_believed(name: str) -> None:
    """On a laptop, or with a policy of one's own, nobody else is harmed."""
    answers = ServedAnswers()
    Asker(name).ask(answers, 1, 20, 0.5)
    Asker(name).ask(answers, 2, 1, 0.5)
    assert rolled_back(answers)


def test_the_tasks_of_a_run_are_the_operators() -> None:
    answers = ServedAnswers()
    run = Asker("run", RecordedBy.WORKER, run_id="run-1")
    run.ask(answers, 1, 20, 0.5, 48)
    run.ask(answers, 2, 20, -1.0, 48)
    ANN.ask(answers, 1, 20, 0.5, 1)
    assert rolled_back(answers)


def test_whose_a_task_is() -> None:
    def owner(**fields: str | None) -> str | None:
        return owner_of(TaskHead(**HEAD.model_dump() | fields))

    assert owner(user_id="ann", session_id="ann/s1") == owner(user_id="ann") == "user ann"
    assert owner(session_id="*4f2a/s1") == owner(session_id="*4f2a/other") == "key 4f2a"
    assert owner(session_id="s1") == owner() == "", "no key is required, or the key acts for no user"
    assert owner(run_id="run-1", user_id="ann") is None


def test_the_window_drops_the_oldest_answers_of_whoever_has_most() -> None:
    answers = ServedAnswers()
    ANN.ask(answers, 1, 20, 0.5, 10)
    EVE.ask(answers, 1, 1, -1.0, 10 * MAX_ANSWERS)
    assert answers.evidence("assistant@v1").answers == MAX_ANSWERS
    assert answers.evidence("assistant@v1", without="user eve").answers == 10
    assert answers.evidence("assistant@v1", without="user ann").answers == MAX_ANSWERS - 10


def test_the_test_without_a_user_has_the_pairs_of_the_others() -> None:
    answers = ServedAnswers()
    for number, reward in ((1, 0.5), (2, -0.2)):
        ANN.ask(answers, number, 20, reward, 12)
        EVE.ask(answers, number, 20, -1.0, 10 * PAIRED_TASKS)
        BEN.ask(answers, number, 20, reward, 12)
    for _ in range(2):
        value = answers.evidence_of_drop("assistant@v2", "assistant@v1", without="user eve")
        assert value == pytest.approx(evidence_of_drop([-0.2] * 24, [0.5] * 24))
    assert set(answers.users("assistant@v2")) == {"user ann", "user ben", "user eve"}
