"""A rollouts topic that is moved to more partitions in the middle of a run: trained on, and replayed equal."""

import subprocess
import sys
from pathlib import Path

import pytest

from schemas import keyed_partitions
from tentalis.local.broker import EmbeddedBroker
from tests.integration.trainer.test_rollouts_topic_lost import trained
from tests.integration.trainer.test_trainer_run import Lab
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
    run = lab.run_log(lab.config())
    rows = [row.rollout_id for step in (1, 2) if (plan := run.latest_plan(step)) is not None for row in plan.rows]
    assert rows and len(set(rows)) == len(rows), "no rollout is trained twice"
    exit_code, report = lab.replay(lab.config())
    assert exit_code == 0, report
