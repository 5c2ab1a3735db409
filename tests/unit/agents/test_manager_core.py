"""The manager's core: pacing, feedback, the end of a run, and that all of it comes from the log."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import policy_name
from schemas.records import (
    BackPressure,
    Feedback,
    Outcome,
    OutcomeKind,
    Record,
    RunManifest,
    Source,
    Task,
    Terms,
)
from tentalis.agents.manager.core import (
    ROUND,
    BadManifest,
    ManagerState,
    Pace,
    feedback_id_of,
    task_id_of,
    trains,
)
from tentalis.agents.manager.process import send_feedback
from tentalis.kafka.errors import RecordTooLarge
from tentalis.kafka.producer import Publisher
from tentalis.policies.candidates import issue_metadata, issued_for
from tests.support.loop_records import (
    RUN,
    ack,
    feedback_on,
    lost,
    manifest,
    outcome,
    plan,
    promotion,
    result,
    task,
    update,
)
from trainer.run.backpressure_gate import BackpressureGate


class Loop:
    """Everything around the manager, played against its core: a worker, a join, a trainer, a server. `fate` decides
    what becomes of a sample: a version lag, or None for a lost one."""

    def __init__(self, *, steps: int = 3, batch: int = 8, n: int = 4, staleness: int = 0) -> None:
        self.steps, self.batch, self.n, self.staleness = steps, batch, n, staleness
        self.log: list[Record] = []
        self.state = ManagerState(RUN, owes_feedback=True)
        self.open: list[tuple[Task, int]] = []
        self.trained = 0
        self.waiting: list[tuple[str, int]] = []
        self.taken: set[str] = set()
        self.stalled = 0
        self.put(manifest(steps=steps, batch=batch, staleness=staleness))
        self.put(ack(1))

    def put(self, record: Record) -> None:
        self.log.append(record)
        self.state.apply(record)

    def metadata(self) -> dict[str, str]:
        return {ROUND: str(self.state.served_step)}

    @property
    def served(self) -> int:
        return 1 + self.trained

    def issue(self, count: int) -> None:
        for _ in range(count):
            issued = task(task_id_of(RUN, self.state.next_index), n=self.n, metadata=self.metadata())
            self.put(issued)
            self.open += [(issued, sample) for sample in range(self.n)]

    def manage(self) -> None:
        for owed in self.state.owed():
            self.put(feedback_on(owed, feedback_id_of(owed.result_id)))
        due = self.state.to_issue(self.n)
        if not due and self.state.starved:
            self.stalled += 1
            due = 1
        self.issue(due)

    def answer(self, survives: bool) -> None:
        of, index = self.open.pop(0)
        version = self.served
        self.put(result(of, index, version=version))
        self.put(outcome(of, index, version=version) if survives else lost(of, index))
        if survives:
            self.waiting.append((f"{of.task_id}/{index}", version))

    def train(self) -> None:
        fresh = [r for r, v in self.waiting if r not in self.taken and v >= self.served - self.staleness]
        if self.trained < self.steps and len(fresh) >= self.batch:
            self.trained += 1
            self.taken.update(fresh[: self.batch])
            self.put(plan(self.trained, fresh[: self.batch]))
            self.put(ack(self.served))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.6), st.integers(0, 2))
def test_the_run_ends_whatever_share_of_samples_is_lost(seed: int, share: float, staleness: int) -> None:
    loop, rng = Loop(staleness=staleness), random.Random(seed)
    for _ in range(2000):
        loop.manage()
        if loop.state.finished:
            break
        for _ in range(rng.randint(0, 5)):
            if loop.open:
                loop.answer(rng.random() >= share)
        loop.train()
    assert loop.state.finished
    assert loop.trained == loop.steps
    # It was never short of what the trainer could take without seeing so: the way out of a stall was not needed.
    assert loop.stalled == 0


class GuardedLoop(Loop):
    """The same with a guard: a trained version is a candidate until `decide`, and a refused one ends its run's branch.
    What is issued for a candidate is answered after the decision, as workers do, unless one gives it up."""

    def __init__(self, **more: Any) -> None:
        self.run, self.first, self.step, self.candidate = RUN, 1, 0, 0
        self.weights = {1: 1}
        super().__init__(**more)
        self.put(self._manifest(RUN, first=1))

    def _manifest(self, run: str, *, first: int) -> RunManifest:
        made = manifest(run, first=first, steps=self.steps, batch=self.batch, staleness=self.staleness)
        return made.model_copy(update={"config": f"{made.config}promotion: guarded\n"})

    @property
    def served(self) -> int:
        return self.first + self.step

    def metadata(self) -> dict[str, str]:
        version = self.state.issue_version
        assert version is not None
        return {ROUND: str(self.state.step_of(version)), **issue_metadata("assistant", version)}

    def answer(self, survives: bool, *, gives_up: bool = False) -> None:
        if gives_up or not survives or issued_for(self.open[0][0]) != self.candidate:
            super().answer(survives)

    def train(self) -> None:
        weights = self.weights[self.served]
        fresh = [r for r, v in self.waiting if r not in self.taken and self.weights[v] == weights]
        if not self.candidate and self.trained < self.steps and len(fresh) >= self.batch:
            self.candidate = self.served + 1
            self.weights[self.candidate] = self.candidate
            self.taken.update(fresh[: self.batch])
            self.put(plan(self.step + 1, fresh[: self.batch], self.run))
            self.put(update(self.candidate, run_id=self.run, step=self.step + 1))

    def decide(self, passes: bool) -> None:
        candidate, self.candidate = self.candidate, 0
        if not candidate:
            return
        if passes:
            self.step, self.trained = self.step + 1, self.trained + 1
        else:
            self.put(promotion(self.served, mode="rollback"))
            number = int(self.run.removeprefix(RUN).removeprefix(".") or 0) + 1
            branch, first = f"{RUN}.{number}", candidate + 1
            parent = {"parent_run": self.run, "parent_step": self.step}
            self.put(self._manifest(branch, first=first).model_copy(update=parent))
            self.weights[first] = self.weights[self.served]
            self.run, self.first, self.step = branch, first, 0
            self.put(update(first, run_id=branch, step=0))
        self.put(promotion(self.served, mode="guarded"))
        self.put(ack(self.served))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_guarded_run_ends_with_a_round_of_its_last_version(seed: int, lost_share: float, refused: float) -> None:
    loop, rng = GuardedLoop(), random.Random(seed)
    for _ in range(3000):
        loop.manage()
        if loop.state.finished:
            break
        for _ in range(rng.randint(0, 5)):
            if loop.open:
                loop.answer(rng.random() >= lost_share, gives_up=rng.random() < 0.1)
        if rng.random() < 0.2:
            loop.decide(rng.random() >= refused)
        loop.train()  # after the decision, or the manager would take a full batch for a stall
    assert loop.state.finished and loop.trained == loop.steps and loop.stalled == 0
    issued = {each.task_id: each for each in loop.log if isinstance(each, Task) and issued_for(each) == loop.served}
    outcomes = [each for each in loop.log if isinstance(each, Outcome) and each.head.task_id in issued]
    others = sum(each.policy_spans[-1].policy != f"assistant@v{loop.served}" for each in outcomes if each.policy_spans)
    assert sum(each.n_samples for each in issued.values()) - others >= loop.batch


def test_the_next_round_is_issued_once_while_a_candidate_is_tried() -> None:
    loop = GuardedLoop(steps=3, batch=8, n=4)
    loop.manage()
    for _ in range(8):
        loop.answer(True)
    loop.train()
    assert loop.candidate == 2 and loop.state.served_version == 1 and loop.state.issue_version == 2
    loop.manage()
    assert len(loop.open) == 8 and {issued_for(of) for of, _ in loop.open} == {2}
    for _ in range(8):
        loop.answer(False)
    loop.manage()
    assert not loop.open, "answers that expired are not replaced before the decision"
    loop.decide(True)
    loop.manage()
    assert len(loop.open) == 8


def test_a_last_round_that_was_given_up_before_the_decision_is_asked_again_once() -> None:
    loop = GuardedLoop(steps=1, batch=8, n=4)
    loop.manage()
    for _ in range(8):
        loop.answer(True)
    loop.train()
    loop.manage()
    for _ in range(8):
        loop.answer(True, gives_up=True)
    loop.manage()
    assert not loop.open and not loop.state.finished
    loop.decide(True)
    assert not loop.state.finished, "the last version has no answer"
    loop.manage()
    assert len(loop.open) == 8
    loop.step -= 1  # an assignment lets the version before answer again
    for _ in range(8):
        loop.answer(True)
    loop.manage()
    assert not loop.open and loop.state.finished


def test_with_a_greater_staleness_nothing_is_issued_for_a_candidate() -> None:
    loop = GuardedLoop(staleness=2)
    loop.put(update(2))
    assert loop.state.issue_version == 1


def test_nothing_is_issued_early_whose_answers_cannot_be_held_back() -> None:
    state = ManagerState(RUN, owes_feedback=False, for_candidates=False)
    for record in (GuardedLoop().log[-1], ack(1), update(2)):
        state.apply(record)
    assert state.pace is not None and state.pace.guarded and state.issue_version == 1


def test_a_candidate_that_the_server_failed_to_load_is_still_issued_for() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    for record in (GuardedLoop().log[-1], update(1), ack(1), update(2), ack(2, ok=False)):
        state.apply(record)
    assert state.issue_version == 2


def test_a_run_whose_versions_are_promoted_by_hand_waits_for_that() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    for record in (manifest(), update(1), promotion(1), ack(1), update(2)):
        state.apply(record)
    assert state.issue_version == 1


def test_without_losses_exactly_one_batch_per_step_and_one_for_the_last_version() -> None:
    loop = Loop(steps=3, batch=8, n=4)
    for _ in range(200):
        loop.manage()
        if loop.open:
            loop.answer(True)
        loop.train()
    assert loop.state.finished
    assert loop.state.next_index == (3 + 1) * 8 // 4


def test_nothing_is_issued_before_the_manifest_and_a_served_version_of_this_run() -> None:
    state = ManagerState(RUN, owes_feedback=True)
    assert state.to_issue(4) == 0 and state.missing == "its manifest"
    state.apply(ack(6))
    state.apply(manifest(first=7, batch=8))
    assert state.to_issue(4) == 0, "version 6 belongs to an earlier run"
    assert state.missing == "its first served version"
    state.apply(ack(7, ok=False))
    assert state.to_issue(4) == 0, "the server refused it"
    state.apply(ack(7))
    assert state.served_step == 0 and state.missing is None
    assert state.to_issue(4) == 2


def with_loss(loss: str) -> Callable[..., RunManifest]:
    """Returns a function that makes the manifest of a run with this loss."""

    def made(**more: Any) -> RunManifest:
        plain = manifest(**more)
        return plain.model_copy(update={"config": f"{plain.config}loss: {{{loss}}}\n"})

    return made


dynamic = with_loss("kind: clipped, dynamic_sampling: true")
rewards_alone = with_loss("dynamic_sampling: true, opd_weight: 0.0")
hints_alone = with_loss("dynamic_sampling: false, rl_weight: 0, max_equal_batches: 2")
pairs_and_hints = with_loss("rl_weight: 0.0, pair: {weight: 0.5}")


def group(state: ManagerState, index: int, rewards: list[float | None], *, opd: bool = False) -> None:
    of = task(task_id_of(RUN, index), n=len(rewards), metadata={ROUND: "0"})
    state.apply(of)
    for sample, reward in enumerate(rewards):
        halves = {"kind": OutcomeKind.BOTH if opd else OutcomeKind.RL, "has_opd": opd}
        state.apply(outcome(of, sample, reward=reward, **halves) if reward is not None else lost(of, sample))


@pytest.mark.parametrize(
    ("config", "rewards", "opd", "usable"),
    [
        (dynamic, [0.7, 0.7, 0.7], False, 0),
        (dynamic, [0.7, None, 0.7], False, 0),
        (dynamic, [0.7, 0.7, 0.6], False, 3),
        (dynamic, [0.7, 0.7, 0.7], True, 3),
        (manifest, [0.7, 0.7, 0.7], False, 3),
        (rewards_alone, [0.7, 0.7, 0.7], True, 0),
        (rewards_alone, [0.7, 0.7, 0.6], True, 3),
        (hints_alone, [0.7, 0.7, 0.6], False, 0),
        (hints_alone, [0.7, 0.7, 0.7], True, 3),
        (pairs_and_hints, [0.7, 0.7, 0.6], False, 3),
    ],
)
def test_a_group_that_no_part_of_the_loss_reads_is_replaced(
    config: Callable[..., RunManifest], rewards: list[float | None], opd: bool, usable: int
) -> None:
    records: list[Record] = [config(batch=3), ack(1)]
    for first in (True, False):  # the order in which the topics are read changes nothing
        state = ManagerState(RUN, owes_feedback=False)
        for record in records if first else ():
            state.apply(record)
        group(state, 0, rewards, opd=opd)
        for record in () if first else records:
            state.apply(record)
        assert state.usable == usable
        assert state.to_issue(3) == (0 if usable else 1)


def test_an_open_group_is_not_yet_one_of_equal_rewards() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    of = task(task_id_of(RUN, 0), n=3, metadata={ROUND: "0"})
    for record in (dynamic(batch=3), ack(1), outcome(of, 0, has_opd=False), outcome(of, 1, has_opd=False), of):
        state.apply(record)
    assert (state.usable, state.running) == (2, 1) and state.to_issue(3) == 0


def test_the_same_reward_for_everything_is_said_after_ten_batches_and_not_for_older_versions() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    state.apply(dynamic(batch=4))
    state.apply(ack(1))
    for index in range(2 * 10):
        assert state.hopeless is None
        group(state, index, [1.0, 1.0])
    assert str(state.hopeless).startswith(
        f"run {RUN} waits for step 1, and 40 answers of its newest version are in groups"
    )
    state.apply(plan(1, ["other/0"]))
    assert state.hopeless is None, "these are of the version before"


def test_the_number_of_batches_before_a_run_is_given_up_is_a_setting() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    state.apply(with_loss("dynamic_sampling: true, max_equal_batches: 1")(batch=4))
    state.apply(ack(1))
    group(state, 0, [1.0, 1.0])
    assert state.hopeless is None
    group(state, 1, [1.0, 1.0])
    assert state.hopeless is not None


def test_answers_without_hints_are_said_where_hints_alone_train() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    state.apply(hints_alone(batch=2))
    state.apply(ack(1))
    for index in range(2):
        assert state.hopeless is None
        group(state, 2 * index, [1.0, 0.0])
        group(state, 2 * index + 1, [1.0, 0.0], opd=True)
    assert "4 answers of its newest version have no hint" in str(state.hopeless)


@pytest.mark.parametrize("loss", ["opd_weight: 0.0", "dynamic_sampling: true"])
def test_answers_without_anything_are_said_after_ten_batches_unless_one_can_be_used(loss: str) -> None:
    state = ManagerState(RUN, owes_feedback=False)
    state.apply(with_loss(loss)(batch=4))
    state.apply(ack(1))
    for index in range(10):
        assert state.hopeless is None
        of = task(task_id_of(RUN, index), n=4, metadata={ROUND: "0"})
        state.apply(of)
        for sample in range(4):
            state.apply(outcome(of, sample, kind=OutcomeKind.EMPTY))
    assert "40 answers of its newest version have neither a reward nor a hint" in str(state.hopeless)
    group(state, 10, [1.0, 0.0])
    assert state.hopeless is None
    state.apply(plan(1, [f"{task_id_of(RUN, 10)}/{sample}" for sample in range(2)]))
    assert state.hopeless is None, "these are of the version before"


def test_a_run_that_reads_no_hints_asks_for_none() -> None:
    hinted = Terms(rl=Source.RESULT, opd=Source.USER)
    for loss, opd in (("opd_weight: 0.0", None), ("opd_weight: 0.5", Source.USER)):
        state = ManagerState(RUN, owes_feedback=True)
        assert state.terms(hinted) == hinted
        state.apply(with_loss(loss)())
        assert state.terms(hinted).opd is opd
        of = task("t", n=1).model_copy(update={"terms": state.terms(hinted)})
        state.apply(of)
        state.apply(result(of))
        assert len(state.owed()) == (opd is not None)
    only = Terms(rl=None, opd=Source.USER)
    assert state.terms(only) == only


def test_a_run_without_an_end_has_no_pace() -> None:
    state = ManagerState(RUN, owes_feedback=True)
    state.apply(manifest(first=7).model_copy(update={"config": "steps: null\nbatch_rollouts: 4\nmax_staleness: 0\n"}))
    state.apply(ack(7))
    assert state.to_issue(4) == 0 and str(state.missing).startswith("a number of steps")
    state.apply(manifest(first=7))
    assert state.missing is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_read_again_in_any_order_of_topics_it_is_the_same(seed: int) -> None:
    loop, rng = Loop(), random.Random(seed)
    for _ in range(rng.randint(1, 120)):
        loop.manage()
        if loop.open and rng.random() < 0.7:
            loop.answer(rng.random() < 0.8)
        loop.train()
    by_topic: dict[type[Record], list[Record]] = {}
    for record in loop.log:
        by_topic.setdefault(type(record), []).append(record)
    kinds = list(by_topic)
    rng.shuffle(kinds)
    again = ManagerState(RUN, owes_feedback=True)
    for kind in kinds:
        for record in by_topic[kind]:
            again.apply(record)
            if rng.random() < 0.1:
                again.apply(record)  # delivered twice
    assert again.to_issue(4) == loop.state.to_issue(4)
    assert again.next_index == loop.state.next_index
    assert {r.result_id for r in again.owed()} == {r.result_id for r in loop.state.owed()}
    assert again.finished == loop.state.finished
    assert again.usable == loop.state.usable


def test_one_feedback_per_result_and_none_for_other_runs() -> None:
    state = ManagerState(RUN, owes_feedback=True)
    of, foreign = task("a"), task("b", run_id="another")
    first, second = result(of, 0), result(of, 0, version=2)
    for each in (first, first, second, result(foreign)):
        state.apply(each)
    assert [r.result_id for r in state.owed()] == [first.result_id, second.result_id]
    state.apply(feedback_on(first, feedback_id_of(first.result_id)))
    assert [r.result_id for r in state.owed()] == [second.result_id]
    state.apply(first)
    assert len(state.owed()) == 1, "a result read again is not answered again"
    # Somebody else's word on it is not the simulated user's.
    state.apply(feedback_on(second, "from-an-operator").model_copy(update={"source": Source.OPERATOR}))
    assert len(state.owed()) == 1


def test_feedback_read_before_its_result_settles_it() -> None:
    state = ManagerState(RUN, owes_feedback=True)
    of = result(task("a"))
    state.apply(feedback_on(of, feedback_id_of(of.result_id)))
    state.apply(of)
    assert state.owed() == []


def test_a_scenario_without_users_owes_nothing() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    state.apply(result(task("a")))
    assert state.owed() == []


def test_late_and_superseded_outcomes_decide_no_sample() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    of = task("a", n=1)
    state.apply(of)
    state.apply(outcome(of, kind=OutcomeKind.SUPERSEDED, outcome_key="a/0/superseded/r"))
    state.apply(outcome(of, kind=OutcomeKind.LATE, outcome_key="a/0/late/h"))
    assert state.running == 1
    state.apply(outcome(of))
    assert state.running == 0


def test_a_trainer_that_refuses_a_full_batch_is_seen_as_starved() -> None:
    loop = Loop(batch=4, n=4)
    loop.manage()
    assert not loop.state.starved
    for _ in range(4):
        loop.answer(True)
    assert loop.state.to_issue(4) == 0
    assert loop.state.starved
    loop.put(plan(1, [r for r, _ in loop.waiting]))
    assert not loop.state.starved


def test_a_sample_counts_as_trainable_by_its_halves_and_its_group() -> None:
    of = task("a", n=4)
    assert trains(outcome(of))
    assert not trains(lost(of))
    assert not trains(outcome(of, not_trainable="greedy sampling"))
    alone = {"kind": OutcomeKind.RL, "has_opd": False, "n_closed": 1}
    assert not trains(outcome(of, **alone)), "a group mean over one sample trains nothing"
    assert trains(outcome(task("b", n=1), **alone))


def test_a_manifest_without_an_end_is_refused_in_words() -> None:
    with pytest.raises(BadManifest, match="run-1 has no usable steps"):
        Pace.of_config("steps: null\nbatch_rollouts: 4\nmax_staleness: 0\n", RUN)
    state = ManagerState(RUN, owes_feedback=True)
    state.apply(manifest(first=1))
    with pytest.raises(BadManifest, match="begin at version 1 and at version 2"):
        state.apply(manifest(first=2))


def test_task_ids_are_derived_from_the_run() -> None:
    assert task_id_of(RUN, 0) == task_id_of(RUN, 0) != task_id_of(RUN, 1) != task_id_of("run-2", 1)
    assert policy_name("assistant", 3) == "assistant@v3"


def test_after_a_rollback_the_branch_is_paced_from_where_it_began() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    for record in (manifest(first=0, steps=6, batch=2, staleness=1), ack(0)):
        state.apply(record)
    for step in (1, 2, 3):
        state.apply(plan(step, [f"a{step}"]))
        state.apply(ack(step))
    assert (state.served_step, state.planned) == (3, 3)
    branch = manifest(f"{RUN}.1", first=4).model_copy(update={"parent_run": RUN, "parent_step": 1})
    assert state.apply(branch) and not state.apply(branch)
    state.apply(ack(4))
    assert (state.served_step, state.planned) == (1, 1), "v4 has the weights of v1"
    # Sampled by v1 and v4, which are the same, and by v3, which is two steps aside: only that is too old.
    for number, version in enumerate((1, 4, 3)):
        state.apply(outcome(task(f"t{number}", n=1), version=version))
    assert state.usable == 2
    assert state.to_issue(1) == 2
    assert state.apply(plan(1, ["t0/0", "t1/0"], f"{RUN}.1"))
    assert not state.apply(plan(4, ["late"])), "what was abandoned plans nothing more"
    assert state.planned == 2
    assert not state.apply(plan(1, ["x"], "somebody-else"))


def test_a_branch_may_go_on_from_another_run_of_the_policy() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    before = manifest("before", first=0), manifest("before.1", first=4)
    before = before[0], before[1].model_copy(update={"parent_run": "before", "parent_step": 2})
    for record in (*before, manifest(first=6, steps=9, batch=2, staleness=1), ack(6), plan(1, ["a"]), ack(7)):
        state.apply(record)
    assert (state.served_step, state.planned) == (1, 1)
    branch = manifest(f"{RUN}.1", first=8).model_copy(update={"parent_run": "before.1", "parent_step": 1})
    assert state.apply(branch)
    state.apply(ack(8))
    assert (state.served_step, state.planned) == (0, 0), "the steps of before and before.1 are none of this run"
    for number, version in enumerate((6, 7, 8)):
        state.apply(outcome(task(f"t{number}", n=1), version=version))
    assert state.usable == 2, "v6 is too old for the step after v8"
    assert state.apply(plan(1, ["b"], f"{RUN}.1")) and state.planned == 1


def test_back_pressure_holds_for_the_runs_own_policy_and_expires() -> None:
    state = ManagerState(RUN, owes_feedback=False)
    said = BackPressure(
        policy="assistant",
        run_id=RUN,
        event_time=1,
        closed=True,
        waiting=3,
        ahead=0,
        max_staleness=2,
        expires_at=1000,
        reason="too old",
    )
    assert state.apply(said) and state.pressed(500) is None, "no manifest yet: whose policy is it?"
    state.apply(manifest())
    assert state.pressed(500) == said and state.pressed(1000) is None
    assert state.apply(said.model_copy(update={"closed": False})) and state.pressed(500) is None


def test_the_next_round_is_issued_although_the_served_version_is_a_step_behind() -> None:
    gate, loop = BackpressureGate("assistant", RUN, 0), GuardedLoop(steps=3, batch=8, n=4)
    for waiting, ahead in ((1, 0), (0, 1)):
        signal = gate.due_signal(waiting, ahead, 1)
        assert signal is not None
        loop.put(signal)
        assert loop.state.pressed(2) == signal, "nothing is published"
    loop.put(update(2))
    assert loop.state.issue_version == 2 and loop.state.pressed(2) is None
    loop.put(ack(2))
    assert loop.state.pressed(2) is not None, "until the trainer has heard of the promotion"


@pytest.mark.parametrize("order", [1, -1])
def test_feedback_that_had_to_go_without_its_result_settles_it(order: int) -> None:
    state = ManagerState(RUN, owes_feedback=True)
    owed, left = result(task("a"), 0), result(task("a"), 1)
    alone = feedback_on(owed, feedback_id_of(owed.result_id)).model_copy(update={"result": None})
    for record in [owed, alone][::order]:
        state.apply(record)
    state.apply(left)
    assert state.owed() == [left]


def test_feedback_on_a_result_that_fills_a_record_goes_without_it() -> None:
    sent: list[Record] = []

    class Small:
        def send(self, topic: str, record: Feedback, *, traceparent: str | None) -> None:
            if record.result is not None:
                raise RecordTooLarge("too large")
            sent.append(record)

    of = result(task("a"))
    feedback = feedback_on(of, feedback_id_of(of.result_id))
    send_feedback(cast(Publisher, Small()), feedback, None)
    assert sent == [feedback.model_copy(update={"result": None})]
