"""Topics of a run that are deleted and created again: the trainer refuses, gives up on record what it lost, or goes on
after an import."""

import subprocess
import sys
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import AuditRecord
from tentalis.kafka.consumer import read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.lost_topics import lost_topics
from tentalis.service.exit_codes import ExitCode
from tests.integration.streams.test_topic_loss import recreate
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import tiny_model

pytestmark = pytest.mark.broker


def trained(lab: Lab, steps: int, *options: str) -> tuple[int, str]:
    """Runs `tentalis train` up to a step; its exit code and what it says."""
    path = lab.write_config(lab.config(steps=steps))
    command = [sys.executable, "-m", "tentalis.cli", "train", "--config", str(path), *options]
    done = subprocess.run(command, env=lab.environment(), capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stderr


def test_a_recreated_topic_is_refused_until_its_loss_is_accepted(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    lab.put_groups(2)
    assert trained(lab, 1)[0] == 0
    recreate(lab.settings, topics.ROLLOUTS)
    lab.put_groups(5)
    code, said = trained(lab, 2)
    assert code == ExitCode.PERMANENT, said
    assert f"{topics.ROLLOUTS} was deleted and created again" in said and "--accept-loss" in said
    assert lost_topics(lab.settings)[0].startswith("trainer, run ")
    code, said = trained(lab, 2, "--accept-loss")
    assert code == 0, said
    assert lost_topics(lab.settings) == [], "the new checkpoint is about the new topic"
    audit = [stored.decode(lab.codec) for stored in read_to_end(lab.settings, topics.AUDIT)]
    assert {each.topic for each in audit if isinstance(each, AuditRecord)} == {topics.ROLLOUTS}


def test_a_run_whose_plans_are_gone_is_refused_until_they_are_imported(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    lab.put_groups(6)
    assert trained(lab, 1)[0] == 0
    run_id, archive = lab.config().run_id, tmp_path / "archive"
    assert command(lab, "export", run_id, "--into", str(archive)).returncode == 0
    recreate(lab.settings, topics.BATCHES)
    code, said = trained(lab, 2)
    assert code == ExitCode.PERMANENT, said
    assert f"{topics.BATCHES} deleted or created again" in said and "tentalis import" in said
    (lost,) = lost_topics(lab.settings)
    assert f"{topics.BATCHES} was deleted and created again" in lost
    imported = command(lab, "import", str(archive))
    assert imported.returncode == 0, imported.stderr
    assert lost_topics(lab.settings) == []
    code, said = trained(lab, 2)
    assert code == 0 and "continues after step 1" in said, said


def command(lab: Lab, *arguments: str) -> "subprocess.CompletedProcess[str]":
    whole = [sys.executable, "-m", "tentalis.cli", *arguments]
    return subprocess.run(whole, env=lab.environment(), capture_output=True, text=True, timeout=120, check=False)
