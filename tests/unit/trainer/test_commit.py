"""The commit of a step while the next one is computed: one at a time, in order, from copies."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.records import BatchPlan, Position, StepResult
from tentalis.policies.lineage import Lineage
from tentalis.service.settings import Settings
from tests.support.loop_records import manifest, plan, promotion
from tests.support.trainer_lab import config, rollouts, tiny_model
from tests.unit.trainer.test_step import engine_of, run_step, state_of
from trainer.distributed.stop import StopRequested
from trainer.model.policy import adapter_sha256, weights_file
from trainer.run import commit as commit_module
from trainer.run import coordinator as coordinator_module
from trainer.run import rank_loop
from trainer.run.backpressure_gate import BackpressureGate
from trainer.run.checkpoint import Checkpoint, save_checkpoint
from trainer.run.commit import Announced, CommittedStep, commit_step
from trainer.run.commit_thread import CommitThread
from trainer.run.coordinator import Coordinator
from trainer.run.publish import canary_of
from trainer.run.rebuild import CannotRebuild
from trainer.run.resume import NO_MOMENTS
from trainer.run.run_log import RunLog
from trainer.run.state import RunState
from trainer.run.stop_condition import FOREVER

PATIENCE = 60.0


def no_check() -> None:
    """Nobody asks to stop."""


def test_a_commit_is_taken_when_it_has_ended_and_its_error_is_raised_where_it_is_taken() -> None:
    thread: CommitThread[int] = CommitThread()
    assert (thread.take(), thread.wait(no_check)) == (None, None)
    gate = threading.Event()
    thread.begin(lambda: int(gate.wait(PATIENCE)))
    assert thread.take() is None
    with pytest.raises(AssertionError):
        thread.begin(lambda: 2)
    checks = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 2:
            gate.set()

    assert thread.wait(check) == 1
    assert len(checks) >= 2 and thread.take() is None
    thread.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        thread.wait(no_check)
    thread.begin(lambda: 3)
    assert thread.wait(no_check) == 3
    thread.close()


def test_an_interrupted_wait_leaves_the_commit_to_end(caplog: pytest.LogCaptureFixture) -> None:
    thread: CommitThread[None] = CommitThread()
    gate, done = threading.Event(), []

    def commit() -> None:
        gate.wait(PATIENCE)
        done.append(1)
        raise OSError("the disk is full")

    def stop() -> None:
        raise StopRequested

    thread.begin(commit)
    with pytest.raises(StopRequested):
        thread.wait(stop)
    threading.Timer(0.1, gate.set).start()
    thread.close()
    assert done == [1]
    assert "the last step was not committed: OSError: the disk is full" in caplog.text


class HeldCommits:
    """A coordinator whose commits wait until the test lets them through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recovered_step: int = 0) -> None:
        self.events: list[str] = []
        self.gates = {step: threading.Event() for step in (1, 2, 3)}
        monkeypatch.setattr(coordinator_module, "commit_step", self.commit)
        run = RunLog("run-1", "assistant")
        state: Any = SimpleNamespace(
            run=run,
            settings=None,
            writer=None,
            manifest=SimpleNamespace(first_version=0),
            copy_step=self.copy,
            apply_commit=lambda committed: self.events.append(f"apply {committed.plan.step}"),
        )
        nothing: Any = None
        metrics: Any = SimpleNamespace(
            **dict.fromkeys(("record_step", "set_position", "set_promoted"), lambda *_: None)
        )
        self.decisions: list[Any] = []
        promotions: Any = SimpleNamespace(poll=lambda _: self.decisions)
        monkeypatch.setattr(coordinator_module, "decode_record", lambda stored, _: stored.record)
        backpressure: Any = SimpleNamespace(gate=BackpressureGate("assistant", "run-1", 0))
        self.coordinator = Coordinator(
            state, nothing, nothing, promotions, metrics, nothing, FOREVER, recovered_step, recovered_step, backpressure
        )

    def copy(self, plan: BatchPlan, *_: object) -> BatchPlan:
        self.events.append(f"copy {plan.step}")
        self.promoted = self.coordinator.state.run.promoted_version
        return plan

    def commit(self, _settings: None, _writer: None, trained: BatchPlan) -> CommittedStep:
        self.events.append(f"begin {trained.step}")
        assert self.gates[trained.step].wait(PATIENCE)
        self.events.append(f"end {trained.step}")
        checkpoint: Any = SimpleNamespace(state=SimpleNamespace(low_water={0: trained.step}))
        return CommittedStep(trained, checkpoint, Announced(None, None), {}, {})

    def trained(self, step: int, check: Callable[[], None] = no_check) -> list[dict[int, int]]:
        output: Any = None
        return self.coordinator.commit_step(plan(step, [f"t{step}/0"]), output, 0.0, check)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCommits]:
    commits = HeldCommits(monkeypatch)
    yield commits
    for gate in commits.gates.values():
        gate.set()
    commits.coordinator.commits.close()


def test_the_next_step_may_compute_but_its_commit_waits_for_the_one_before(held: HeldCommits) -> None:
    assert held.trained(1) == []
    assert held.coordinator.take_commit() == [], "the loop goes on"

    def check() -> None:
        assert "copy 2" not in held.events, "the copy of a third step would be the second in memory"
        held.gates[1].set()

    assert held.trained(2, check) == [{0: 1}]
    held.gates[2].set()
    assert held.coordinator.wait_for_commit(no_check) == [{0: 2}]
    assert held.events == ["copy 1", "begin 1", "end 1", "apply 1", "copy 2", "begin 2", "end 2", "apply 2"]
    assert held.coordinator.take_commit() == []


def test_a_commit_knows_what_was_decided_while_its_step_was_computed(held: HeldCommits) -> None:
    """It prunes by it: the version that a rollback goes back to could otherwise be removed, and the run would end."""
    held.decisions = [SimpleNamespace(offset=5, record=promotion(3, "rollback"))]
    held.trained(1)
    assert held.promoted == 3


def test_a_stop_ends_the_wait_and_the_step_after_is_not_committed(held: HeldCommits) -> None:
    held.trained(1)

    def stop() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        held.trained(2, stop)
    assert "copy 2" not in held.events and "end 1" not in held.events
    threading.Timer(0.1, held.gates[1].set).start()
    held.coordinator.commits.close()
    assert held.events == ["copy 1", "begin 1", "end 1"]


def test_a_step_that_is_trained_again_is_committed_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapter may differ from the recorded one: then nothing may follow it on the log."""
    held = HeldCommits(monkeypatch, recovered_step=1)
    for gate in held.gates.values():
        gate.set()
    assert held.trained(1) == [{0: 1}]
    assert held.trained(2) == []
    assert held.coordinator.wait_for_commit(no_check) == [{0: 2}]
    held.coordinator.commits.close()


@pytest.mark.parametrize("ending", ["rolled back", "done", ""])
def test_an_end_waits_for_the_commit(ending: str, held: HeldCommits) -> None:
    sent: list[Any] = []
    channel: Any = SimpleNamespace(send_command=lambda command: sent.append(command))
    coordinator: Any = SimpleNamespace(
        update_backpressure=lambda: None,
        rolled_back=ending == "rolled back",
        end_reason="it has completed its steps" if ending == "done" else None,
        wait_for_commit=lambda check: held.coordinator.wait_for_commit(check),
        next_plan=lambda: None,
        reading_paused=False,
        should_pause_reading=False,
    )
    held.trained(1)
    stop: Any = SimpleNamespace(check=lambda: held.gates[1].set())
    rank_loop._send_next_command(coordinator, channel, stop)
    ends = [] if not ending else [{"done": {0: 1}}, {"finish": ending == "rolled back"}]
    assert sent == ends
    assert ("apply 1" in held.events) == bool(ends), "while the run continues, nothing waits"


def run_state(tmp_path: Path) -> RunState:
    run_config = config(tiny_model(tmp_path / "model"), steps=None)
    engine = engine_of(run_config)
    policy = engine.policy
    parts = policy.weights_bytes(), policy.files(), NO_MOMENTS
    first = save_checkpoint(tmp_path / "first", state_of(engine, step=0), *parts)
    settings = Settings(bootstrap="127.0.0.1:1", home=tmp_path / "home")
    begun = manifest("run", first=0).model_copy(update={"policy": "tiny"})
    run = RunLog("run", "tiny", {"m": begun}, relatives=(begun,))
    writer: Any = SimpleNamespace(write=lambda topic, record, traceparent=None: None)
    return RunState(settings, run_config, engine, run, writer, begun, "me", first, Lineage((begun,)))


def plan_of_step(step: int) -> BatchPlan:
    return plan(step, [f"t{step}/0"]).model_copy(
        update={"run_id": "run", "policy": "tiny", "low_water": (Position(topic="r", partition=0, offset=step),)}
    )


def test_what_is_committed_is_the_step_as_it_was_whatever_the_next_one_does(tmp_path: Path) -> None:
    state = run_state(tmp_path)
    engine, run_config = state.engine, state.config
    output = run_step(engine, run_config, rollouts(2, 4, prefix="a-"), 1)
    trained = state.copy_step(plan_of_step(1), output, {"fetch": 0.5})
    assert (state.step, state.checkpoint.state.step) == (1, 0)
    before, canary, moments = engine.policy.weights_bytes(), canary_of(engine.policy), engine.optimizer_state()
    run_step(engine, run_config, rollouts(2, 4, prefix="b-", seed=1), 2)
    assert weights_file(trained.weights) == before != engine.policy.weights_bytes()
    assert trained.announcement.canary == canary != canary_of(engine.policy)
    committed = commit_step(state.settings, state.writer, trained)
    assert Checkpoint.read(committed.checkpoint.folder).weights() == before
    saved = committed.checkpoint.optimizer()
    assert saved.steps == moments.steps == 1
    assert all(saved.moments[name].equal(moment) for name, moment in moments.moments.items())
    assert committed.checkpoint.state.low_water == {0: 1}
    assert committed.seconds.keys() == {*output.seconds, "fetch", "publish"}
    state.apply_commit(committed)
    assert (state.checkpoint.state.step, state.run.last_step, list(state.run.updates)) == (1, 1, [1])
    assert state.run.updates[1].sha256 == adapter_sha256(before)


def test_the_records_of_a_step_follow_its_checkpoint_and_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, events = run_state(tmp_path), list[str]()

    def watched(name: str, function: Callable[..., Any]) -> None:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return function(*arguments)

        monkeypatch.setattr(commit_module, name, call)

    for name in ("save_checkpoint", "upload_checkpoint", "publish_adapter", "prune"):
        watched(name, getattr(commit_module, name))
    write: Any = lambda topic, record, traceparent=None: events.append(type(record).__name__)  # noqa: E731
    state.writer = SimpleNamespace(write=write)  # type: ignore[assignment]
    output = run_step(state.engine, state.config, rollouts(2, 4, prefix="a-"), 1)
    trained = state.copy_step(plan_of_step(1), output, {})
    committed = commit_step(state.settings, state.writer, trained)
    order = ["save_checkpoint", "upload_checkpoint", "StepResult", "publish_adapter", "PolicyUpdate", "prune"]
    assert events == order
    # After a crash the log has its records: nothing is written twice, and other bytes are refused before anything is.
    state.apply_commit(committed)
    events.clear()
    again = state.copy_step(plan_of_step(1), output, {})
    assert commit_step(state.settings, state.writer, again).announced == Announced(None, None)
    assert events == [name for name in order if name not in ("StepResult", "PolicyUpdate")]
    events.clear()
    run_step(state.engine, state.config, rollouts(2, 4, prefix="b-", seed=1), 2)
    with pytest.raises(CannotRebuild, match="trained again from its plan and gave the adapter"):
        commit_step(state.settings, state.writer, state.copy_step(plan_of_step(1), output, {}))
    assert events == []


def test_both_plans_that_may_be_on_the_log_are_made_anew_if_their_offsets_mean_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldCommits(monkeypatch)
    coordinator, state = held.coordinator, held.coordinator.state
    coordinator.planned_step, coordinator.offsets_anew, state.step = 2, True, 0
    for step in (1, 2, 3):
        state.run.plans[step, 1] = plan(step, [f"t{step}/0"])
    made: list[str] = []

    def new_plan(_self: Coordinator, step: int, attempt: int) -> BatchPlan:
        made.append(f"new {step}/{attempt}")
        return plan(step, [f"t{step}/0"]).model_copy(update={"attempt": attempt})

    def resume_plan(_self: Coordinator, found: BatchPlan) -> BatchPlan:
        made.append(f"as it is {found.step}")
        return found

    monkeypatch.setattr(Coordinator, "_may_begin", lambda _: True)
    monkeypatch.setattr(Coordinator, "_new_plan", new_plan)
    monkeypatch.setattr(Coordinator, "_resume_plan", resume_plan)
    planner: Any = SimpleNamespace(consume=lambda *_: None, pending=0)
    metrics: Any = SimpleNamespace(record_plan=lambda *_: None)
    coordinator.planner, coordinator.metrics = planner, metrics
    for step in (0, 1, 2):
        state.step = step
        coordinator.next_plan()
    assert made == ["new 1/2", "new 2/2", "as it is 3"]


def test_the_next_attempt_of_a_plan_that_was_made_anew_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what is left of its rollouts without the culprits. A further plan would lose them without a drop: they
    are below its low water."""
    held = HeldCommits(monkeypatch)
    coordinator, state = held.coordinator, held.coordinator.state
    coordinator.planned_step, coordinator.offsets_anew, state.step = 1, True, 0
    state.run.plans[1, 1] = plan(1, ["old/0"])
    anew = plan(1, ["good/0", "bad/0"]).model_copy(update={"attempt": 2})
    monkeypatch.setattr(Coordinator, "_may_begin", lambda _: True)
    monkeypatch.setattr(Coordinator, "_new_plan", lambda *_: anew)
    monkeypatch.setattr(Coordinator, "_resume_plan", lambda _, found: found)
    planner: Any = SimpleNamespace(consume=lambda *_: None, pending=0)
    metrics: Any = SimpleNamespace(record_plan=lambda *_: None)
    coordinator.planner, coordinator.metrics = planner, metrics
    assert coordinator.next_plan() is anew
    rest = anew.model_copy(update={"attempt": 3, "rows": anew.rows[:1]})
    state.run.plans[1, 3] = rest  # as `drop_culprits` leaves it
    assert coordinator.next_plan() is rest


def test_the_result_on_the_log_belongs_to_the_attempt(tmp_path: Path) -> None:
    state = run_state(tmp_path)
    output = run_step(state.engine, state.config, rollouts(2, 4, prefix="a-"), 1)
    recorded = StepResult.model_construct(step=1, attempt=1)
    state.run.results[1, 1] = recorded
    assert state.copy_step(plan_of_step(1), output, {}).announcement.result is recorded
    second = plan_of_step(1).model_copy(update={"attempt": 2})
    assert state.copy_step(second, output, {}).announcement.result is None
