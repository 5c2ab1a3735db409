"""A plan or a manifest that somebody altered is named before anything is trained, and by --verify-only too."""

from typing import Any

import pytest

from schemas.records import BatchPlan, RunManifest
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, manifest, plan, step_result
from trainer.data.plan import with_plan_id
from trainer.replay import recording
from trainer.replay.recording import CannotReplay, RunRecording, read_recording
from trainer.run.manifest import manifest_digest
from trainer.run.run_log import RunLog


def genuine() -> tuple[RunManifest, BatchPlan]:
    """Of a run of one step, each under the id that its content gives it."""
    run_manifest = manifest(first=0)
    run_manifest = run_manifest.model_copy(update={"digest": manifest_digest(run_manifest)})
    return run_manifest, with_plan_id(
        plan(1, ["t/0", "t/1"]).model_copy(update={"manifest_digest": run_manifest.digest})
    )


def verified(monkeypatch: pytest.MonkeyPatch, run_manifest: RunManifest, planned: BatchPlan) -> RunRecording:
    """Returns the recording for `--verify-only`, with every rollout present and genuine."""
    results = [step_result(0, 0, attempt=0, plan_id=None), step_result(1, 1, plan_id=planned.plan_id)]
    run = RunLog(
        RUN,
        "assistant",
        {run_manifest.digest: run_manifest},
        {(1, 1): planned},
        {(result.step, result.attempt): result for result in results},
    )
    places = {row.rollout_id: (row.partition, row.offset) for row in planned.rows}

    def examine(*given: Any) -> list[Any]:
        given[-1].update(places)
        return []

    monkeypatch.setattr(recording, "read_run", lambda *_: run)
    monkeypatch.setattr(recording, "find_problems", examine)
    nothing: Any = None
    return read_recording(RUN, Settings(), nothing, 0, None, False, None, train=False)


def test_what_is_as_its_id_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified(monkeypatch, *genuine()).plans == (genuine()[1],)


def test_an_altered_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rollout less, under the same id."""
    run_manifest, planned = genuine()
    with pytest.raises(CannotReplay, match="forged: the plan of step 1, attempt 1, of run run-1"):
        verified(monkeypatch, run_manifest, planned.model_copy(update={"rows": planned.rows[:1]}))


def test_an_altered_manifest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run_manifest, planned = genuine()
    with pytest.raises(CannotReplay, match=f"forged: the manifest {run_manifest.key}"):
        verified(monkeypatch, run_manifest.model_copy(update={"config": "steps: 9\n"}), planned)
