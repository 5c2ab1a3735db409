"""Runs whose candidates the guard refused, on a real broker: each refusal begins a branch, and all of them replay."""

import shutil
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Promotion
from tentalis.policies.guard import ROLLBACK, GuardMode
from tentalis.text.timestamps import now_ms
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import rollouts, tiny_model
from trainer.run.checkpoint import checkpoint_root

pytestmark = pytest.mark.broker


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path) -> Lab:
    return Lab(kafka, unique, tmp_path, tiny_model(tmp_path / "model"))


def decide(lab: Lab, version: int, sha256: str, *modes: str) -> None:
    for mode in modes:
        lab.publisher.send(
            topics.POLICIES,
            Promotion(policy=lab.policy, version=version, event_time=now_ms(), sha256=sha256, mode=mode),
        )
    lab.publisher.flush()


def test_two_refusals_in_a_row_begin_branches_that_replay_without_any_checkpoint(lab: Lab) -> None:
    made = rollouts(8, policy=lab.policy, prefix=f"{lab.policy}-")
    run_config = lab.config(steps=None)
    runs = [run_config, *(run_config.model_copy(update={"run_id": f"{run_config.run_id}.{n}"}) for n in (1, 2))]
    for number, run in enumerate(runs):
        lab.put(*made[8 * number : 8 * number + 8])
        assert lab.train(run_config, "steps=1") == 0, lab.log_text(run_config)
        # The first version of each run has the weights that are served already. The second one is refused.
        served = lab.run_log(run).first_manifest
        assert served is not None and served.first_version == 2 * number
        decide(lab, served.first_version, lab.hashes(run)[0], GuardMode.GUARDED, ROLLBACK)
    assert len({lab.hashes(run)[0] for run in runs}) == 1, "each begins with what is served"
    assert len({lab.hashes(run)[1] for run in runs}) == 3, "each trains other rollouts"
    parents = [lab.run_log(run).first_manifest for run in runs]
    assert [(each.parent_run, each.parent_step) for each in parents if each is not None] == [
        (None, None),
        (runs[0].run_id, 0),
        (runs[1].run_id, 0),
    ]
    for run in runs:
        shutil.rmtree(checkpoint_root(lab.settings, run.run_id))
    log = lab.folder / "replay.log"
    for run in reversed(runs):
        log.unlink(missing_ok=True)
        shutil.rmtree(lab.settings.home / "replays", ignore_errors=True)
        code, report = lab.replay(run)
        assert (code, report["equal"], [step["step"] for step in report["steps"]]) == (0, True, [0, 1]), report
        later = [each.run_id for each in runs[runs.index(run) + 1 :]]
        told = f"run {run.run_id} was rolled back; what followed is not part of it: {', '.join(later)}"
        assert (told in log.read_text()) == bool(later), log.read_text()
