"""`tentalis up`, `status`, `down` as processes: ready means ready, a failed start says why, nothing is left behind."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas.avro import all_current
from tentalis.metrics import PROCESSES, exported_by
from tests.integration.inference_lab import make_model
from tests.kafka_fixture import eventually

pytestmark = pytest.mark.broker
NOT_ASKED_FOR = ("gateway", "sessions", "experience")
CLI = [sys.executable, "-m", "tentalis.cli"]


def run(home: Path, *arguments: str, timeout: float = 400) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("TENTALIS_")}
    if "TENTALIS_CACHE" in os.environ:
        env["TENTALIS_CACHE"] = os.environ["TENTALIS_CACHE"]
    env |= {"TENTALIS_HOME": str(home), "LC_ALL": "C"}
    return subprocess.run(
        [*CLI, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError as error:  # it begins to listen when it has loaded its libraries
        return 0, str(error)


def test_a_detached_stack_is_ready_is_found_and_ends(tmp_path: Path) -> None:
    # Kafka takes a comma for the end of a path, Log4j a blank, and a JVM in the locale C what is not ASCII.
    home, model = tmp_path / "a home, ünï" / "☃", make_model(tmp_path / "tiny")
    try:
        up = run(home, "up", "--detach", "--policy-model", str(model))
        assert up.returncode == 0, up.stderr
        shown = json.loads(run(home, "status", "-o", "json").stdout)
        states = {name: process["state"] for name, process in shown["processes"].items()}
        assert states["topics"] == "done"
        assert {name for name, state in states.items() if state == "ready"} >= {"broker", "model", "join", "worker"}
        measured = {name: process["port"] for name, process in shown["processes"].items() if process["port"]}
        assert set(measured) == set(PROCESSES) - {"manager", *NOT_ASKED_FOR}
        for name, port in measured.items():
            eventually(lambda port=port: get(port, "/readyz")[0] == 200, 120, message=f"{name} is not ready")
            assert get(port, "/healthz")[0] == 200
            families = {f.name for f in text_string_to_metric_families(get(port, "/metrics")[1])}
            assert families == {m.name.removesuffix("_total") for m in exported_by(name)}, name
        assert str(measured["trainer"]) in run(home, "status").stdout
        # Without a bootstrap server named, the running stack of the state directory is the one that is meant.
        assert run(home, "topics", "diff").returncode == 0
        again = run(home, "up", "--detach", "--policy-model", str(model))
        assert (again.returncode, "runs in" in again.stderr) == (1, True)
    finally:
        down = run(home, "down")
    assert down.returncode == 0, down.stderr
    assert run(home, "status").returncode == 1
    # The log outlives the stack: the broker comes back for the one command.
    read = run(home, "consume", "tentalis.schemas.v1", "--exit", "-o", "json")
    assert {json.loads(line)["key"] for line in read.stdout.splitlines()} == {
        s.fingerprint.hex() for s in all_current()
    }
    assert "the broker of" in read.stderr
    assert run(home, "status").returncode == 1


def test_a_stack_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    up = run(tmp_path / "home", "up", "--detach", "--policy-model", str(tmp_path / "nothing"))
    assert up.returncode == 1
    assert "nothing" in up.stderr
