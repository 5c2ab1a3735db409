"""`tentalis policy` and `tentalis rollouts` on a real broker: what they show, and what they write."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Pin, Promotion
from tentalis.cli.main import app
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import Lab
from tests.support.loop_records import ack, manifest, step_result, update
from tests.support.trainer_lab import rollout

pytestmark = pytest.mark.broker
runner = CliRunner()


class Bench:
    """A policy with three versions on the log, of which v1 is served, and its commands."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.name = lab, lab.name
        self.folder = folder
        own = {"policy": lab.name, "run_id": f"run-{lab.name}"}
        lab.put(
            topics.RUNS, manifest(own["run_id"], first=0).model_copy(update={"policy": lab.name, "digest": lab.name})
        )
        for version in range(3):
            home = folder / f"v{version}"
            home.mkdir()
            weights = b"w%d" % version
            (home / "adapter_model.safetensors").write_bytes(weights)
            sha256 = hashlib.sha256(weights).hexdigest()
            metrics = {"reward_mean": version / 4}
            lab.put(topics.BATCHES, step_result(version, version, own["run_id"], policy=lab.name, metrics=metrics))
            lab.put(topics.POLICIES, update(version, location=home.as_uri(), step=version, sha256=sha256, **own))
            if version < 2:
                lab.put(topics.POLICIES, self.promotion(version))

    def promotion(self, version: int, mode: str = "always") -> Promotion:
        sha256 = hashlib.sha256(b"w%d" % version).hexdigest()
        return Promotion(policy=self.name, version=version, event_time=1, sha256=sha256, mode=mode)

    def run(self, *arguments: str, stdin: str | None = None) -> Any:
        broker = ("--bootstrap-server", self.lab.settings.require_bootstrap())
        return runner.invoke(app, [*arguments, *broker], input=stdin)

    def read(self, *arguments: str) -> Any:
        done = self.run(*arguments, "-o", "json")
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def written(self) -> list[tuple[str, int, object]]:
        """The decisions about the policy in log order: the mode of each promotion, and pins."""
        mine = lambda r: isinstance(r, (Promotion, Pin)) and r.policy == self.name  # noqa: E731
        found = self.lab.records(topics.POLICIES, mine)
        return [(type(r).__name__, r.version, r.mode if isinstance(r, Promotion) else r.pinned) for r in found]


@pytest.fixture
def bench(kafka: Kafka, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / "home"))
    return Bench(Lab(kafka.bootstrap, unique), tmp_path)


def test_versions_are_listed_shown_and_compared(bench: Bench) -> None:
    rows = bench.read("policy", "list", bench.name)
    assert [(row["version"].rpartition("@")[2], row["state"]) for row in rows] == [
        ("v2", "candidate"),
        ("v1", "promoted"),
        ("v0", "past"),
    ]
    assert f"{bench.name}@v2" in bench.run("policy", "list").stdout
    assert bench.read("policy", "show", bench.name)["version"] == f"{bench.name}@v1"
    difference = bench.read("policy", "diff", f"{bench.name}@v0", f"{bench.name}@v2")
    assert difference["steps_between"] == 2 and difference["metrics"]["reward_mean"] == [0.0, 0.5]
    unknown = bench.run("policy", "list", "nobody")
    assert unknown.exit_code == 1 and "no version of 'nobody' was published" in unknown.stderr


def test_promotions_and_rollbacks_by_hand_are_written_to_the_log(bench: Bench) -> None:
    before = [("Promotion", 0, "always"), ("Promotion", 1, "always")]
    v2 = f"{bench.name}@v2"
    (planned,) = bench.read("policy", "promote", v2, "--dry-run")
    assert (planned["version"], planned["mode"]) == (2, "manual")
    declined = bench.run("policy", "promote", v2, stdin="n\n")
    assert declined.exit_code != 0 and f"Serve {v2}?" in declined.stderr
    assert bench.written() == before
    (served,) = bench.read("policy", "promote", v2, "--yes", "--reason", "it is good")
    assert served["reason"] == "it is good" and served["by"].startswith("cli/")
    bench.read("policy", "rollback", bench.name, "--yes")
    bench.read("policy", "pin", f"{bench.name}@v0", "--yes")
    bench.read("policy", "pin", f"{bench.name}@v0", "--off", "--yes")
    assert bench.written()[2:] == [
        ("Promotion", 2, "manual"),
        ("Promotion", 1, "rollback"),
        ("Pin", 0, True),
        ("Pin", 0, False),
    ]
    (bench.folder / "v2" / "adapter_model.safetensors").write_bytes(b"damaged")
    refused = bench.run("policy", "promote", v2, "--yes")
    assert refused.exit_code == 1 and f"{v2} cannot be served" in refused.stderr
    assert len(bench.written()) == 6


def test_rollouts_are_listed_by_what_is_asked_for_and_shown(bench: Bench) -> None:
    for index, reward in enumerate((-0.5, 0.5)):
        made = rollout(f"{bench.name}-{index}", policy=bench.name, reward=reward, version=index)
        head = made.head.model_copy(update={"session_id": f"{bench.name}-s{index}"})
        bench.lab.put(
            topics.ROLLOUTS,
            rollout(f"{bench.name}-{index}", policy=bench.name, reward=reward, version=index, head=head),
        )

    def listed(*options: str) -> list[str]:
        rows = bench.read("rollouts", "list", "--policy", bench.name, *options)
        return sorted(row["rollout_id"].removeprefix(f"{bench.name}-") for row in rows)

    assert listed() == ["0/0", "1/0"]
    assert listed("--min-reward", "0") == ["1/0"] and listed("--max-reward", "0") == ["0/0"]
    assert listed("--version", "1") == ["1/0"] and listed("--session", f"{bench.name}-s0") == ["0/0"]
    assert listed("--environment", "chat", "--since", "1h") == ["0/0", "1/0"]
    assert listed("--environment", "math") == listed("--until", "1h") == []
    (record,) = bench.read("rollouts", "show", f"{bench.name}-1")
    assert (record["rollout_id"], record["token_ids"]) == (f"{bench.name}-1/0", [3, 4, 5, 6, 10, 11, 12])
    assert bench.run("rollouts", "show", "nobody").exit_code == 1


def test_the_status_of_a_cluster_names_its_topics_applications_and_served_versions(bench: Bench) -> None:
    """No process of this machine is needed: the cluster says who works on it."""

    def shown() -> Any:
        done = bench.run("status", "-o", "json")
        assert done.exit_code == 1, "nobody joins halves, so it is in trouble"
        return json.loads(done.stdout)

    assert shown()["missing_topics"] == []
    states = {row["application"]: (row["state"], row["needed"]) for row in shown()["applications"]}
    assert states["join"][0] in ("absent", "no member") and states["join"][1]

    def mine() -> Any:
        return next(row for row in shown()["policies"] if row["version"].startswith(f"{bench.name}@"))

    assert (mine()["version"], mine()["served_by"]) == (f"{bench.name}@v1", None)
    bench.lab.put(topics.POLICY_ACKS, ack(1, policy=bench.name, server_id="server-7"))
    assert mine()["served_by"] == "server-7"
    table = bench.run("status").stdout
    assert "every topic is there" in table and f"{bench.name}@v1" in table
