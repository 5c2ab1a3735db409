"""A rollouts topic that is moved to more partitions in the middle of a run: trained on, replayed equal, replayed with
another setting, and taken back to a version from before the move."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas import keyed_partitions
from tentalis.local.broker import EmbeddedBroker
from tests.integration.trainer.test_rollouts_topic_lost import trained
from tests.integration.trainer.test_trainer_run import Lab, promote
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import tiny_model

pytestmark = [pytest.mark.broker, pytest.mark.long]


def tentalis(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tentalis.cli", *arguments]
    return subprocess.run(command, env=lab.environment(), capture_output=True, text=True, timeout=180, check=False)


def test_a_run_goes_on_after_a_move_and_is_replayed(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    lab.put_groups(6)
    assert trained(lab, 1)[0] == 0
    moved = tentalis(lab, "topics", "repartition", "--partitions", "12", "--yes")
    assert moved.returncode == 0, moved.stderr
    monkeypatch.setenv(keyed_partitions.VARIABLE, "12")
    code, said = trained(lab, 2)
    assert code == 0 and "was moved to 12 partitions" in said, said
    first = lab.config()
    run = lab.run_log(first)
    rows = [row.rollout_id for step in (1, 2) if (plan := run.latest_plan(step)) is not None for row in plan.rows]
    assert rows and len(set(rows)) == len(rows), "no rollout is trained twice"
    exit_code, report = lab.replay(first)
    assert exit_code == 0, report
    other = tentalis(lab, "replay", first.run_id, "--set", "learning_rate=0.002", "-o", "json")
    assert other.returncode == 0, other.stdout + other.stderr
    steps = json.loads(other.stdout)["steps"]
    assert [each["step"] for each in steps] == [1, 2], other.stdout
    assert all(each["changed_sha256"] != each["recorded_sha256"] for each in steps), other.stdout
    promote(lab, 1, "rollback")
    code, said = trained(lab, 3, "--steps", "1")
    assert code == 0, said
    branch = lab.run_log(first.model_copy(update={"run_id": f"{first.run_id}.1"}))
    assert branch.first_manifest is not None and branch.first_manifest.parent_step == 1
    again = [row.rollout_id for plan in branch.plans.values() for row in plan.rows]
    assert again and not {*again} & {*rows}, "no rollout is trained twice"
