"""`tentalis up`, `status`, `down` as processes: ready means ready, a failed start says why, nothing is left behind.
The page of the first steps on a laptop is executed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas.wire.avro import all_current
from tentalis.cli.shared.metrics_page import exported_by
from tentalis.kafka.topology import APPLICATIONS, InStack
from tests.docker.promtool import queries
from tests.support import ROOT
from tests.support.inference_lab import make_model
from tests.support.kafka_fixture import eventually
from tests.support.transcript import PageShell, commands_of

pytestmark = pytest.mark.broker
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
    model = make_model(tmp_path / "tiny")
    more = {"up": ["--policy-model", str(model), "--scale", "aggregation=2"]}
    with PageShell(tmp_path / "a home, ünï" / "☃", more=more) as laptop:
        stack_of_the_page(laptop, model)


def stack_of_the_page(laptop: PageShell, model: Path) -> None:
    """Follows the page to its end, and looks closer while the stack runs."""
    page = commands_of(ROOT / "docs" / "start" / "laptop.md")
    last = next(number for number, command in enumerate(page) if command.text.startswith("tentalis down"))
    home = laptop.folder / ".tentalis"
    try:
        laptop.follow(page[:last])
        shown = json.loads(run(home, "status", "-o", "json").stdout)
        states = {name: process["state"] for name, process in shown["processes"].items()}
        assert states["topics"] == "done"
        assert {state for name, state in states.items() if name != "topics"} == {"ready"}, states
        assert run(home, "status").returncode == 0
        measured = {name: process["port"] for name, process in shown["processes"].items() if process["port"]}
        wanted = (InStack.ALWAYS, InStack.WITH_GATEWAY)
        assert set(measured) == {*(each.name for each in APPLICATIONS if each.in_stack in wanted), "aggregation-2"}
        exposed = set[str]()
        for name, port in measured.items():
            eventually(lambda port=port: get(port, "/readyz")[0] == 200, 120, message=f"{name} is not ready")
            assert get(port, "/healthz")[0] == 200
            families = {f.name for f in text_string_to_metric_families(get(port, "/metrics")[1])}
            wanted = exported_by(name.removesuffix("-2"))
            assert families == {metric.name.removesuffix("_total") for metric in wanted}, name
            exposed |= families
        shown_metrics = {name for _, query in queries() for name in re.findall(r"\b(?:tentalis|process)_\w+", query)}
        ends = re.compile(r"_(?:total|bucket|sum|count)$")
        missing = {ends.sub("", name) for name in shown_metrics} - exposed
        assert len(shown_metrics) > 20 and not missing, "no process of the stack exposes what a dashboard shows"
        assert str(measured["trainer"]) in run(home, "status").stdout
        families = {f.name: f for f in text_string_to_metric_families(get(shown["port"], "/metrics")[1])}
        assert {"tentalis_supervisor_process_state", "tentalis_broker_reachable"} <= families.keys()
        assert families["tentalis_broker_memory_bytes"].samples[0].value > 1e8
        sizes = {sample.labels["topic"]: sample.value for sample in families["tentalis_broker_log_bytes"].samples}
        assert sizes["tentalis.schemas.v1"] > 0 and "__consumer_offsets" in sizes
        laptop.follow(commands_of(ROOT / "docs" / "operations" / "observability.md"))
        operated(home, shown["processes"])
        # Without a bootstrap server named, the running stack of the state directory is the one that is meant.
        assert run(home, "topics", "diff").returncode == 0
        again = run(home, "up", "--detach", "--policy-model", str(model))
        assert (again.returncode, "runs in" in again.stderr) == (1, True)
        laptop.follow(page[last:])
    finally:
        down = run(home, "down")
    assert down.returncode == 0 and "no stack runs" in down.stderr, down.stderr
    assert run(home, "status").returncode == 1
    # The log outlives the stack: the broker comes back for the one command.
    read = run(home, "consume", "tentalis.schemas.v1", "--exit", "-o", "json")
    assert {json.loads(line)["key"] for line in read.stdout.splitlines()} == {
        s.fingerprint.hex() for s in all_current()
    }
    assert "the broker of" in read.stderr
    assert run(home, "status").returncode == 1


def operated(home: Path, before: dict[str, Any]) -> None:
    """An operator's actions on single processes of a running stack, and their effects."""

    def now(name: str) -> dict[str, Any]:
        return dict(json.loads((home / "status.json").read_text())["processes"][name])

    log, config = Path(before["broker"]["log"]), home / "kafka" / "log4j2.xml"
    assert "GroupCoordinator" not in log.read_text()
    assert run(home, "log-level", "broker", "INFO").returncode == 0
    time.sleep(2)  # the broker looks each second
    done = run(home, "restart", "aggregation-2")
    assert done.returncode == 0 and "aggregation-2 is ready" in done.stderr, done.stderr
    assert "GroupCoordinator" in log.read_text()
    assert run(home, "log-level", "broker", "DEFAULT").returncode == 0 and 'Root level="WARN"' in config.read_text()
    assert run(home, "log-level", "scoring", "DEBUG").returncode == 0
    broker = before["broker"]["pid"]
    os.kill(broker, signal.SIGSTOP)
    try:
        eventually(lambda: now("broker")["state"] == "unresponsive", 30)
        assert run(home, "status").returncode == 1
    finally:
        os.kill(broker, signal.SIGCONT)
    os.kill(before["join"]["pid"], signal.SIGKILL)
    eventually(lambda: now("broker")["state"] == "ready", 60)
    eventually(lambda: now("join")["state"] == "ready" and now("join")["restarts"] == 1, 120)
    events = [json.loads(line) for line in run(home, "events", "join", "-o", "json").stdout.splitlines()]
    assert any(each["event"] == "exited" and "SIGKILL" in each["detail"] for each in events)
    eventually(lambda: "the log level is now DEBUG" in run(home, "logs", "scoring", "--level", "WARNING").stdout, 30)
    assert now("broker")["pid"] == broker and now("model")["restarts"] == 0


def test_a_stack_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    up = run(tmp_path / "home", "up", "--detach", "--policy-model", str(tmp_path / "nothing"))
    assert up.returncode == 1
    assert "nothing" in up.stderr
