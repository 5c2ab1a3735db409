"""The checkpoint that is trusted, the plan that comes next, and the channel between ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas import topics
from schemas.ids import sha256_hex
from schemas.records import BatchPlan, PlanRow, StepResult
from tentalis.kafka.identity import TopicLost
from tentalis.storage.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_WEIGHTS
from tests.support import loop_records
from trainer.distributed.environment import CONFIG_FILE as CONFIG_JSON
from trainer.distributed.ranks import RankChannel, join_ranks
from trainer.distributed.stop import StopRequest, StopRequested
from trainer.model.policy import VersionFiles
from trainer.replay.recording import CannotReplay, recorded_steps
from trainer.run.backpressure_gate import BackpressureGate
from trainer.run.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    Checkpoint,
    CheckpointState,
    save_checkpoint,
    set_aside,
)
from trainer.run.commit import Announced, CommittedStep
from trainer.run.control_topics import check_control_topics
from trainer.run.coordinator import Coordinator
from trainer.run.rebuild import CannotRebuild, check_reproduced, recorded_plan
from trainer.run.resume import NO_MOMENTS, _check_fits, is_confirmed, resume_point
from trainer.run.rollback import CannotBranch
from trainer.run.run_log import RunLog

ADAPTER = b"weights"
NO_FILES = VersionFiles(ADAPTER_WEIGHTS, {ADAPTER_CONFIG: b"{}"})
SHAPE = VersionFiles(ADAPTER_WEIGHTS, {ADAPTER_CONFIG: b'{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'})


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


def checkpoint_state(step: int, attempt: int = 1, owner: str = "me", manifest: str = "m") -> CheckpointState:
    attempt = attempt if step else 0
    return CheckpointState(
        run_id="run",
        policy="tiny",
        step=step,
        attempt=attempt,
        plan_id=f"{step}/{attempt}" if step else None,
        owner=owner,
        manifest_digest=manifest,
        low_water={0: 8},
        adapter_sha256=sha256_hex(ADAPTER),
        optimizer_steps=step,
        metrics={},
        seconds={},
    )


def checkpoint(root: Path, step: int, attempt: int = 1, owner: str = "me", manifest: str = "m") -> Checkpoint:
    return save_checkpoint(root, checkpoint_state(step, attempt, owner, manifest), ADAPTER, NO_FILES, NO_MOMENTS)


def found(root: Path, run: RunLog) -> Checkpoint | None:
    return resume_point(root, run)[0]


def test_a_zombies_checkpoint_is_not_believed(tmp_path: Path) -> None:
    run = log_of([plan(1), plan(2, 1, "zombie"), plan(2, 2, "me")], [result(0, 0), result(1, 1)])
    first = checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 0)
    for zombie in (checkpoint(tmp_path, 2, 1, "zombie"), checkpoint(tmp_path, 2, 2, "zombie")):
        assert not is_confirmed(zombie, run)
    assert not is_confirmed(checkpoint(tmp_path, 3), run)
    assert found(tmp_path, run) == first
    # Before its first result: the plan is executed again from the checkpoint before it.
    own = checkpoint(tmp_path, 2, 2, "me")
    assert is_confirmed(own, run)
    assert found(tmp_path, run) == own


def test_a_run_whose_first_checkpoint_was_not_finished_begins_again(tmp_path: Path) -> None:
    assert found(tmp_path, log_of([], [])) is None
    checkpoint(tmp_path, 0, manifest="of another log")
    assert found(tmp_path, log_of([], [])) is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_low_water(path: Path) -> None:
    path.write_text(path.read_text().replace('"0": 8', '"0": 9'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (OPTIMIZER_FILE, flip),
        (ADAPTER_WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:3])),
        (ADAPTER_WEIGHTS, Path.unlink),
        (STATE_FILE, flip),
        (STATE_FILE, lambda path: path.write_text("")),
        (STATE_FILE, change_low_water),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    run = log_of([plan(1), plan(2)], [result(0, 0), result(1, 1), result(2, 1)])
    before, newest = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    assert resume_point(tmp_path, run) == (newest, [])
    damage(newest.folder / name)
    usable, damaged = resume_point(tmp_path, run)
    assert usable == before
    assert [bad.folder for bad in damaged] == [newest.folder] and name in str(damaged[0])
    place = set_aside(damaged[0])
    assert place.parent == tmp_path / "damaged" and place.is_dir()
    assert resume_point(tmp_path, run) == (before, [])


def test_a_checkpoint_without_a_digest_of_its_state_is_read(tmp_path: Path) -> None:
    """Those of 0.1.0."""
    written = checkpoint(tmp_path, 1)
    path = written.folder / STATE_FILE
    path.write_text(written.state.model_dump_json())
    assert Checkpoint.read(written.folder) == written


def test_a_completed_step_is_trained_again_with_the_plan_that_won() -> None:
    run = log_of([plan(1), plan(2), plan(2, 2)], [result(0, 0), result(1, 1), result(2, 2)])
    assert recorded_plan(run, 2, "m") == plan(2, 2)
    for other, words in [
        (log_of([plan(1)], [result(1, 1), result(2, 1)]), "step 2 of run run has no usable checkpoint.*plan is not"),
        (log_of([plan(2)], [result(1, 1)]), "its result is not there. Restore the newest checkpoint"),
        (log_of([plan(2).model_copy(update={"plan_id": "x"})], [result(2, 1)]), "its plan is not there"),
    ]:
        with pytest.raises(CannotRebuild, match=words):
            recorded_plan(other, 2, "m")
    with pytest.raises(
        CannotRebuild, match=r"trained under the manifest m, and this start has n.*Start the trainer once"
    ):
        recorded_plan(run, 2, "n")


def test_a_step_trained_again_to_other_bytes_is_not_committed() -> None:
    run = log_of([plan(1)], [result(0, 0), result(1, 1)])
    check_reproduced(run.results.get((1, 1)), plan(1), "sha-1-1")
    check_reproduced(run.results.get((2, 1)), plan(2), "new")
    with pytest.raises(CannotRebuild, match="gave the adapter other, but the log has sha-1-1"):
        check_reproduced(run.results.get((1, 1)), plan(1), "other")


def test_a_run_does_not_continue_on_another_config_json_of_its_base_model(tmp_path: Path) -> None:
    """The weights are the same, so their digest is; no replay could have both."""
    engine: Any = SimpleNamespace(policy=SimpleNamespace(files=lambda: SHAPE))
    checkpoint = save_checkpoint(tmp_path, checkpoint_state(1), ADAPTER, SHAPE, NO_MOMENTS)
    then = loop_records.manifest("run").model_copy(update={"environment": {CONFIG_JSON: "then", "source": "a"}})
    now = then.model_copy(update={"environment": {CONFIG_JSON: "now", "source": "b"}})
    run = RunLog("run", "tiny", relatives=(then,))
    _check_fits(checkpoint, run, then.model_copy(update={"environment": now.environment | then.environment}), engine)
    with pytest.raises(CannotBranch, match=r"was trained with other settings in the config\.json of its base model"):
        _check_fits(checkpoint, run, now, engine)
    earlier = then.model_copy(update={"environment": {}})
    _check_fits(checkpoint, replace(run, relatives=(earlier,)), now, engine)
    with pytest.raises(CannotBranch, match="was trained on another base model"):
        _check_fits(checkpoint, run, then.model_copy(update={"base_sha256": "other"}), engine)


def test_a_whole_model_and_an_adapter_do_not_continue_each_other(tmp_path: Path) -> None:
    whole = VersionFiles(MODEL_WEIGHTS, {})
    manifest = loop_records.manifest("run")
    for number, (of, now, words) in enumerate(
        [
            (whole, SHAPE, r"trained the whole model \(`lora: null`\), where the configuration now trains an adapter"),
            (SHAPE, whole, r"trained an adapter, where the configuration now trains the whole model \(`lora: null`\)"),
        ]
    ):
        engine: Any = SimpleNamespace(policy=SimpleNamespace(files=lambda now=now: now))
        checkpoint = save_checkpoint(tmp_path / str(number), checkpoint_state(1), ADAPTER, of, NO_MOMENTS)
        assert checkpoint.weights() == ADAPTER
        with pytest.raises(CannotBranch, match=words):
            _check_fits(checkpoint, RunLog("run", "tiny"), manifest, engine)


def test_replay_follows_the_attempt_that_won() -> None:
    run = log_of([plan(1), plan(2), plan(2, 2)], [result(0, 0), result(1, 1), result(2, 2)])
    results, plans = recorded_steps(run, None)
    assert [r.adapter_sha256 for r in results] == ["sha-0-0", "sha-1-1", "sha-2-2"]
    assert [(p.step, p.attempt) for p in plans] == [(1, 1), (2, 2)]
    assert len(recorded_steps(run, 1)[1]) == 1
    for missing, words in [
        (log_of([plan(1)], [result(0, 0), result(1, 1), result(2, 1)]), "plan of step 2"),
        (log_of([plan(1)], [result(1, 1)]), "result of step 0"),
        (RunLog("run", "", {}, other_runs=frozenset({"b", "a"})), "has no run 'run'; runs there: a, b"),
    ]:
        with pytest.raises(CannotReplay, match=words):
            recorded_steps(missing, None)
    with pytest.raises(CannotReplay, match="up to step 2, not 5"):
        recorded_steps(run, 5)


def test_the_channel_keeps_order_and_forgets_what_was_read() -> None:
    channel = RankChannel(join_ranks())
    other = RankChannel(join_ranks())
    for number in range(3):
        channel.send_report({"n": number})
        channel.send_command([number])
    assert other.receive_reports() == []
    assert channel.receive_reports() == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert channel.receive_reports() == []
    assert [channel.next_command() for _ in range(4)] == [[0], [1], [2], None]
    channel.barrier("here", "come here", StopRequest().check)
    stop = StopRequest()
    stop.request()
    with pytest.raises(StopRequested):
        channel.wait_for_command(stop.check)


def test_what_a_trainer_holds_of_its_run_does_not_grow_with_its_steps() -> None:
    run = RunLog("run", "tiny", plans={(1, 1): plan(1)}, results={(0, 0): result(0, 0)})

    def apply_commit(committed: CommittedStep) -> None:
        run.results[committed.plan.step, 1] = result(committed.plan.step, 1)

    coordinator: Any = SimpleNamespace(
        state=SimpleNamespace(run=run, apply_commit=apply_commit, manifest=SimpleNamespace(first_version=0)),
        metrics=SimpleNamespace(record_step=lambda *_: None),
        backpressure=SimpleNamespace(gate=BackpressureGate("p", "run", 0)),
        recovered_step=0,
    )
    for step in range(1, 50):
        run.plans[step, 1], run.plans[step + 1, 1] = plan(step), plan(step + 1)
        checkpoint: Any = SimpleNamespace(state=checkpoint_state(step))
        committed = CommittedStep(plan(step), checkpoint, Announced(None, None), {}, {})
        assert Coordinator._committed(coordinator, committed) == [checkpoint_state(step).low_water]
        assert (set(run.plans), set(run.results)) == ({(step, 1), (step + 1, 1)}, {(step, 1)})


IDS = {topics.RUNS: "a", topics.BATCHES: "b", topics.POLICIES: "c"}


def state_of(step: int, ids: dict[str, str] | None = IDS) -> CheckpointState:
    return checkpoint_state(step).model_copy(update={"control_topic_ids": ids})


@pytest.mark.parametrize("lost", IDS)
def test_a_control_topic_that_was_created_again_is_refused_if_the_log_lacks_the_checkpoint(lost: str) -> None:
    log = log_of([plan(1)], [result(0, 0), result(1, 1)]) if lost == topics.POLICIES else log_of([], [result(0, 0)])
    with pytest.raises(TopicLost, match=f"{lost} deleted or created again: run run has a checkpoint of step 1"):
        check_control_topics(log, [state_of(1)], IDS | {lost: "new"})
    with pytest.raises(TopicLost, match=lost):
        check_control_topics(log, [state_of(1)], {name: each for name, each in IDS.items() if name != lost})


def test_plans_that_were_lost_before_the_newest_was_written_are_refused_until_they_are_imported() -> None:
    """The topic was created again, and the last step before the trainer noticed it is on the new one."""
    results, changed = [result(0, 0), result(1, 1)], IDS | {topics.BATCHES: "new"}
    with pytest.raises(TopicLost, match=f"{topics.BATCHES} deleted or created again: .* without the plan of step 1"):
        check_control_topics(log_of([plan(2)], results), [state_of(2)], changed)
    check_control_topics(log_of([plan(1), plan(2)], results), [state_of(2)], changed)


def test_a_checkpoint_of_an_aborted_plan_is_no_loss_and_two_steps_without_one_are() -> None:
    log = log_of([plan(1)], [result(0, 0), result(1, 1)])
    check_control_topics(log, [state_of(2)], IDS)
    check_control_topics(log, [], IDS)
    with pytest.raises(TopicLost, match="records are missing"):
        check_control_topics(log, [state_of(3, None)], IDS)
