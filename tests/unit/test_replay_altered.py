"""A plan or a manifest that somebody altered is named before anything is trained, and by --verify-only too."""

from typing import Any

import pytest

from schemas.records import BatchPlan, RunManifest
from tentalis.config import Settings
from tests.unit.loop_records import RUN, manifest, plan, step_result
from trainer import recording
from trainer.manifest import digest_of
from trainer.plan import identified
from trainer.recording import CannotReplay, Recording, checked_recording
from trainer.runlog import RunLog


def genuine() -> tuple[RunManifest, BatchPlan]:
    """Of a run of one step, each under the id that its content gives it."""
    of_run = manifest(first=0)
    of_run = of_run.model_copy(update={"digest": digest_of(of_run)})
    return of_run, identified(plan(1, ["t/0", "t/1"]).model_copy(update={"manifest_digest": of_run.digest}))


def verified(monkeypatch: pytest.MonkeyPatch, of_run: RunManifest, planned: BatchPlan) -> Recording:
    """What `--verify-only` looks at, where every rollout is there and genuine."""
    results = [step_result(0, 0, attempt=0, plan_id=None), step_result(1, 1, plan_id=planned.plan_id)]
    run = RunLog(
        RUN,
        "assistant",
        {of_run.digest: of_run},
        {(1, 1): planned},
        {(result.step, result.attempt): result for result in results},
    )
    places = {row.rollout_id: (row.partition, row.offset) for row in planned.rows}

    def examine(*given: Any) -> list[Any]:
        given[-1].update(places)
        return []

    monkeypatch.setattr(recording, "read_run", lambda *_: run)
    monkeypatch.setattr(recording, "examine", examine)
    nothing: Any = None
    return checked_recording(RUN, Settings(), nothing, 0, None, False, None, train=False)


def test_what_is_as_its_id_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified(monkeypatch, *genuine()).plans == (genuine()[1],)


def test_an_altered_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rollout less, under the same id."""
    of_run, planned = genuine()
    with pytest.raises(CannotReplay, match="forged: the plan of step 1, attempt 1, of run run-1"):
        verified(monkeypatch, of_run, planned.model_copy(update={"rows": planned.rows[:1]}))


def test_an_altered_manifest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_run, planned = genuine()
    with pytest.raises(CannotReplay, match=f"forged: the manifest {of_run.key}"):
        verified(monkeypatch, of_run.model_copy(update={"config": "steps: 9\n"}), planned)
