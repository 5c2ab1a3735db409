"""`tentalis observe`: what Prometheus and Grafana need to watch the local stack."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.local.state import StateDir
from tests.support import ROOT

RUNNING: dict[str, Any] = {
    "running": True,
    "port": 9000,
    "processes": {"join": {"port": 9001}, "join-2": {"port": 9002}, "topics": {"port": None}},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    return tmp_path


def test_the_files_lead_from_prometheus_and_grafana_to_each_process(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateDir, "status", lambda _: RUNNING)
    assert CliRunner().invoke(app, ["observe", "--dry-run"]).exit_code == 0 and not (home / "observe").exists()
    done = CliRunner().invoke(app, ["observe", "-o", "json"])
    assert done.exit_code == 0, done.stderr
    config = yaml.safe_load((home / "observe" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = json.loads(Path(job["file_sd_configs"][0]["files"][0]).read_text())
    assert {each["labels"]["process"]: each["targets"] for each in targets} == {
        "join": ["127.0.0.1:9001"],
        "join-2": ["127.0.0.1:9002"],
        "supervisor": ["127.0.0.1:9000"],
    }
    rules = [
        rule for group in json.loads(Path(config["rule_files"][0]).read_text())["groups"] for rule in group["rules"]
    ]
    assert rules and all((ROOT / rule["annotations"]["runbook"]).exists() for rule in rules)
    provisioned = yaml.safe_load((home / "observe" / "grafana" / "dashboards" / "tentalis.yaml").read_text())
    boards = sorted(Path(provisioned["providers"][0]["options"]["path"]).iterdir())
    assert [each.name for each in boards] == ["gateway.json", "loop.json", "streams.json", "training.json"]
    assert not any("{{pod}}" in each.read_text() for each in boards) and "{{process}}" in boards[1].read_text()
    source = yaml.safe_load((home / "observe" / "grafana" / "datasources" / "prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://127.0.0.1:9090"


def test_without_a_stack_it_writes_nothing(home: Path) -> None:
    done = CliRunner().invoke(app, ["observe"])
    assert done.exit_code == 1 and "no stack runs" in done.stderr and not (home / "observe").exists()
