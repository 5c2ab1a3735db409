"""Which checkpoint is believed, which plan comes next, and the channel between ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from schemas.records import BatchPlan, PlanRow, StepResult
from tests.unit import loop_records
from trainer import world
from trainer.checkpoint import Checkpoint, CheckpointState
from trainer.lead import Lead
from trainer.pressure import Valve
from trainer.recording import CannotReplay, recorded
from trainer.resume import CannotResume, believed, resume_point
from trainer.runlog import RunLog
from trainer.step import Outcome
from trainer.stop import Stop, Stopped
from trainer.world import Channel

HERE = Path("checkpoints")


def plan(step: int, attempt: int = 1, owner: str = "me") -> BatchPlan:
    row = PlanRow(
        rollout_id=f"s{step}",
        digest="d",
        partition=0,
        offset=step,
        n_tokens=1,
        rl=True,
        opd=False,
        rank=0,
        micro_batch=0,
    )
    return BatchPlan(
        run_id="run",
        step=step,
        attempt=attempt,
        plan_id=f"{step}/{attempt}",
        event_time=0,
        manifest_digest="m",
        policy="tiny",
        topic="t",
        rows=(row,),
        world_size=1,
        seed=0,
        owner=owner,
    )


def result(step: int, attempt: int) -> StepResult:
    return StepResult(
        run_id="run",
        step=step,
        attempt=attempt,
        plan_id=f"{step}/{attempt}" if step else None,
        event_time=0,
        policy="tiny",
        policy_version=step,
        adapter_sha256=f"sha-{step}-{attempt}",
        owner="me",
    )


MANIFEST = loop_records.manifest("run", first=0).model_copy(update={"policy": "tiny"})


def log_of(plans: list[BatchPlan], results: list[StepResult]) -> RunLog:
    return RunLog(
        "run",
        "tiny",
        {"m": MANIFEST},
        {(p.step, p.attempt): p for p in plans},
        {(r.step, r.attempt): r for r in results},
    )


def checkpoint(step: int, attempt: int = 1, owner: str = "me", manifest: str = "m") -> Checkpoint:
    attempt = attempt if step else 0
    state = CheckpointState(
        run_id="run",
        policy="tiny",
        step=step,
        attempt=attempt,
        plan_id=f"{step}/{attempt}" if step else None,
        owner=owner,
        manifest_digest=manifest,
        low_water={},
        adapter_sha256="a",
        optimizer_steps=step,
        metrics={},
        seconds={},
    )
    return Checkpoint(folder=HERE / state.folder_name, state=state)


def test_a_zombies_checkpoint_is_not_believed() -> None:
    run = log_of([plan(1), plan(2, 1, "zombie"), plan(2, 2, "me")], [result(0, 0), result(1, 1)])
    assert believed(checkpoint(2, 2, "me"), run)
    assert not believed(checkpoint(2, 1, "zombie"), run)
    assert not believed(checkpoint(2, 2, "zombie"), run)
    assert not believed(checkpoint(3), run)
    found = [checkpoint(2, 1, "zombie"), checkpoint(1), checkpoint(0)]
    assert resume_point(found, run, HERE) == checkpoint(1)
    # Before its first result: the plan is executed again from the checkpoint before it.
    assert resume_point([checkpoint(2, 2, "me"), *found], run, HERE) == checkpoint(2, 2, "me")


def test_a_run_whose_first_checkpoint_was_not_finished_begins_again() -> None:
    assert resume_point([], log_of([], []), HERE) is None
    assert resume_point([checkpoint(0, manifest="of another log")], log_of([], []), HERE) is None


def test_results_without_their_checkpoint_are_an_error_in_words() -> None:
    run = log_of([plan(1), plan(2)], [result(0, 0), result(1, 1), result(2, 1)])
    with pytest.raises(CannotResume, match="result for step 2 of run run, but below checkpoints the newest checkpoint"):
        resume_point([checkpoint(1)], run, HERE)
    with pytest.raises(CannotResume, match="is none"):
        resume_point([], run, HERE)


def test_replay_follows_the_attempt_that_won() -> None:
    run = log_of([plan(1), plan(2), plan(2, 2)], [result(0, 0), result(1, 1), result(2, 2)])
    results, plans = recorded(run, None)
    assert [r.adapter_sha256 for r in results] == ["sha-0-0", "sha-1-1", "sha-2-2"]
    assert [(p.step, p.attempt) for p in plans] == [(1, 1), (2, 2)]
    assert len(recorded(run, 1)[1]) == 1
    for missing, words in [
        (log_of([plan(1)], [result(0, 0), result(1, 1), result(2, 1)]), "plan of step 2"),
        (log_of([plan(1)], [result(1, 1)]), "result of step 0"),
        (RunLog("run", "", {}, other_runs=frozenset({"b", "a"})), "knows no run 'run'; runs there: a, b"),
    ]:
        with pytest.raises(CannotReplay, match=words):
            recorded(missing, None)
    with pytest.raises(CannotReplay, match="up to step 2, not 5"):
        recorded(run, 5)


def test_the_channel_keeps_order_and_forgets_what_was_read() -> None:
    channel = Channel(world.join())
    other = Channel(world.join())
    for number in range(3):
        channel.report({"n": number})
        channel.command([number])
    assert other.reports() == []
    assert channel.reports() == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert channel.reports() == []
    assert [channel.next_command() for _ in range(4)] == [[0], [1], [2], None]
    channel.gather("here", Stop().check)
    stop = Stop()
    stop.ask()
    with pytest.raises(Stopped):
        channel.wait_command(stop.check)


def test_what_a_trainer_holds_of_its_run_does_not_grow_with_its_steps() -> None:
    run = RunLog("run", "tiny", plans={(1, 1): plan(1)}, results={(0, 0): result(0, 0)})

    def commit(done: BatchPlan, *_: object) -> dict[str, float]:
        run.results[done.step, 1] = result(done.step, 1)
        return {}

    said = SimpleNamespace(stepped=lambda *_: None)
    head, pressure = SimpleNamespace(run=run, commit=commit, version=0), SimpleNamespace(valve=Valve("p", "run", 0))
    lead = cast(Lead, SimpleNamespace(head=head, metrics=said, pressure=pressure))
    for step in range(1, 50):
        run.plans[step, 1] = plan(step)
        Lead.complete(lead, plan(step), Outcome({}, {}), 0.0)
        assert (set(run.plans), set(run.results), run.last_step) == ({(step, 1)}, {(step, 1)}, step)
