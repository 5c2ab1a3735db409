"""The checkpoint from which a replay continues, and its step."""

from pathlib import Path

from schemas.ids import sha256_hex
from schemas.records import StepResult
from tentalis.service.settings import Settings
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.loop_records import manifest, step_result
from trainer.model.policy import VersionFiles
from trainer.replay.recording import _first_step, find_beginning
from trainer.run.checkpoint import CheckpointState, save_checkpoint
from trainer.run.resume import NO_MOMENTS
from trainer.run.run_log import RunLog

ADAPTER = b"weights after step 5 of run-1"


def checkpoint(root: Path, run_id: str, step: int) -> None:
    state = CheckpointState(
        run_id=run_id,
        policy="assistant",
        step=step,
        attempt=1,
        plan_id="p",
        owner="o",
        manifest_digest="m",
        low_water={},
        adapter_sha256=sha256_hex(ADAPTER),
        optimizer_steps=step,
        metrics={},
        seconds={},
    )
    save_checkpoint(root, state, ADAPTER, VersionFiles(ADAPTER_WEIGHTS, {}), NO_MOMENTS)


def branch() -> tuple[RunLog, list[StepResult]]:
    """run-1.1, which goes on from step 5 of run-1 with three steps of its own."""
    first = manifest(first=9).model_copy(update={"run_id": "run-1.1", "parent_run": "run-1", "parent_step": 5})
    results = [step_result(step, 9 + step) for step in range(4)]
    results[0] = results[0].model_copy(update={"adapter_sha256": sha256_hex(ADAPTER)})
    return RunLog("run-1.1", "assistant", {"m": first}), results


def test_from_its_parents_checkpoint_a_branch_trains_all_its_own_steps(tmp_path: Path) -> None:
    run, results = branch()
    checkpoint(tmp_path / "checkpoints" / "run-1", "run-1", 5)
    found = find_beginning(Settings(home=tmp_path), run, results, 0)
    assert found is not None and (found.state.run_id, found.state.step) == ("run-1", 5)
    assert _first_step(run, results, found) == 0


def test_what_a_replay_of_the_branch_trained_of_its_parent_is_found(tmp_path: Path) -> None:
    run, results = branch()
    assert find_beginning(Settings(home=tmp_path), run, results, 0) is None
    checkpoint(tmp_path / "replays" / "run-1.1-abc" / "run-1", "run-1", 5)
    found = find_beginning(Settings(home=tmp_path), run, results, 0)
    assert found is not None and found.state.run_id == "run-1"
