"""`tentalis policy assign`, `unassign` and `compare` on a real broker."""

from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import Assignment
from tests.integration.agents.test_policy_command import Bench
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import Lab
from tests.support.loop_records import ack, assignment_ack, outcome, task, update

pytestmark = pytest.mark.broker


@pytest.fixture
def bench(kafka: Kafka, unique: str, tmp_path: Path) -> Bench:
    return Bench(Lab(kafka.bootstrap, unique), tmp_path)


def written(bench: Bench) -> list[Any]:
    found = bench.lab.records(topics.POLICIES, lambda r: isinstance(r, Assignment) and r.replaces == bench.name)
    return [(each.scope.value, each.subject, each.name, each.percent, each.active) for each in found]


def test_an_assignment_is_written_shown_and_ended(bench: Bench) -> None:
    name = bench.name
    done = bench.run("policy", "assign", "worker-3", f"{name}@v0", "--percent", "10", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "10% of the tasks" in done.stderr and "no worker 'worker-3' has joined" in done.stderr
    assert bench.run("policy", "assign", "environment:nowhere", f"{name}@latest", "--yes").exit_code == 0
    assert bench.run("policy", "assign", "shared", f"{name}@v2", "--dry-run").exit_code == 0
    assert written(bench) == [
        ("worker", "worker-3", f"{name}@v0", 10.0, True),
        ("environment", "nowhere", f"{name}@latest", 100.0, True),
    ]
    bench.lab.put(topics.POLICY_ACKS, assignment_ack(0, policy=name, ok=False), ack(1, policy=name))
    shown = bench.run("policy", "list", name).stdout
    assert "worker-3" in shown and "the server local cannot hold it" in shown and "no room" in shown
    assert bench.read("policy", "show", f"{name}@v0")["assigned_to"] == ["worker worker-3"]
    assert bench.run("policy", "unassign", "worker-3", "--yes").exit_code == 0
    assert written(bench)[-1] == ("worker", "worker-3", f"{name}@v0", 10.0, False)
    again = bench.run("policy", "unassign", "worker-3", "--yes")
    assert again.exit_code == 1 and "has no assignment" in again.stderr
    assert "worker-3" not in bench.run("policy", "list", name).stdout


def test_what_cannot_be_assigned_is_refused_with_what_to_do(bench: Bench) -> None:
    name = bench.name
    other = f"{name}-b"
    bench.lab.put(topics.POLICIES, update(0, policy=other, run_id=other, base_sha256="another", base_model="bigger"))
    for arguments, code, words in (
        (("w", f"{name}@v9"), 1, "v9"),
        (("w", "nobody@v1"), 1, "published policies"),
        (("w", f"{other}@latest"), 1, "promote one"),
        (("w", f"{other}@v0", "--instead-of", name), 1, "another base model"),
        (("w", name), 2, f"{name!r} is not a version"),
        (("w", f"{name}@v1", "--percent", "0"), 2, "unassign"),
        (("worker:", f"{name}@v1"), 2, "name a worker"),
    ):
        refused = bench.run("policy", "assign", *arguments, "--yes")
        assert (refused.exit_code, words in refused.stderr) == (code, True), (arguments, refused.stderr)
    assert written(bench) == []


def test_the_rewards_of_two_versions_are_compared_by_task(bench: Bench) -> None:
    name = bench.name
    for version, reward in ((1, 0.25), (2, 0.75)):
        for number in range(12):
            of = task(f"{name}-{version}-{number}", policy=name)
            bench.lab.put(topics.OUTCOMES, *(outcome(of, i, version=version, reward=reward) for i in range(2)))
    found = bench.read("policy", "compare", f"{name}@v2", f"{name}@v1")
    assert (found["one"]["tasks"], found["one"]["samples"], found["other"]["mean"]) == (12, 24, 0.25)
    assert (found["difference"], found["low"], found["high"]) == (0.5, 0.5, 0.5)
    text = bench.run("policy", "compare", f"{name}@v2", name).stdout
    assert "+0.5000" in text and "bootstrap" in text
    nothing = bench.run("policy", "compare", f"{name}@v0", name)
    assert nothing.exit_code == 0 and f"no rewards of {name}@v0" in nothing.stdout
    assert bench.run("policy", "compare", name, name, "--since", "soon").exit_code == 2


def test_a_version_is_exported_by_its_name_and_a_damaged_one_is_not(bench: Bench) -> None:
    name, target = bench.name, bench.folder / "exported"
    arguments = ("policy", "export", name, "--format", "safetensors", "--to", str(target))
    done = bench.run(*arguments)
    assert done.exit_code == 0, done.stderr
    assert (target / "adapter_model.safetensors").read_bytes() == b"w1" and "vllm serve BASE" in done.stdout
    again = bench.run(*arguments)
    assert again.exit_code == 1 and "exists" in again.stderr
    (bench.folder / "v1" / "adapter_model.safetensors").write_bytes(b"damaged")
    damaged = bench.run(*arguments[:-1], str(bench.folder / "other"))
    assert damaged.exit_code == 1 and "is damaged" in damaged.stderr and not (bench.folder / "other").exists()
    assert bench.run("policy", "export", name, "--format", "onnx", "--to", str(target)).exit_code == 2
    absent = bench.run(
        "policy", "export", name, "--format", "gguf", "--to", str(bench.folder / "g"), "--base", "/nowhere"
    )
    assert absent.exit_code == 1 and "--base" in absent.stderr
