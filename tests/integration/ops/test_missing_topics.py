"""Every process that finds a topic missing ends with the same code, and names the topic."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.kafka import offsets, preflight
from tentalis.kafka.acls import ROLES
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.exit_codes import ExitCode

pytestmark = pytest.mark.broker
SERVER = ("--server", "http://127.0.0.1:1")


def test_a_missing_topic_ends_every_process_with_3_and_its_name(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asks in (preflight, offsets):  # the second reads the record of topic ids, which is missing too
        monkeypatch.setattr(asks, "TOPIC_PATIENCE_S", 0.0)
    config = tmp_path / "run.yaml"
    config.write_text("{run_id: r, policy: p, base_model: m, base_model_name: m}", encoding="utf-8")
    processes = {
        "gateway": ("serve", "gateway", *SERVER, "--port", "0"),
        "worker": ("worker", *SERVER),
        "policies": ("serve", "policies", *SERVER),
        "manager": ("manager", "--run", "r"),
        "trainer": ("train", "--config", str(config)),
        "join": ("serve", "join"),
    }
    env = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(tmp_path)}
    for role, command in processes.items():
        done = CliRunner().invoke(app, command, env=env)
        assert done.exit_code == ExitCode.DRIFT, (role, done.output)
        assert f"which the role {role} needs: `tentalis topics apply` creates it" in done.stderr, role
        assert all(grant.name in done.stderr for grant in ROLES[role].grants if grant.resource == "topic"), role
    done = CliRunner().invoke(app, ["consume", "tentalis.tasks.v1", "--exit"], env=env)
    assert done.exit_code == ExitCode.DRIFT and "no topic tentalis.tasks.v1" in done.stderr
