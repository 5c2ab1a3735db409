"""Looks at a standing stack as its operator does: what is ready, what it measures, and what actions on it do."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from schemas.wire.avro import all_current
from tentalis.cli.shared.metrics_page import exported_by
from tentalis.kafka.topology import APPLICATIONS, InStack
from tests.docker.promtool import queries
from tests.e2e.lab import Home
from tests.support import ROOT
from tests.support.http_get import answer_of
from tests.support.kafka_fixture import eventually
from tests.support.transcript import PageShell, commands_of


def looked_at(home: Home, laptop: PageShell) -> None:
    """Checks that ready means ready and that every metric of the catalogue and of the dashboards is there, follows the
    page of observability, and acts on single processes."""
    shown = json.loads(home.run("status", "-o", "json").stdout)
    states = {name: process["state"] for name, process in shown["processes"].items()}
    assert states["topics"] == "done"
    assert {state for name, state in states.items() if name != "topics"} == {"ready"}, states
    assert home.run("status").returncode == 0
    measured = {name: process["port"] for name, process in shown["processes"].items() if process["port"]}
    wanted = (InStack.ALWAYS, InStack.WITH_GATEWAY)
    assert set(measured) == {*(each.name for each in APPLICATIONS if each.in_stack in wanted), "aggregation-2"}
    exposed = set[str]()
    for name, port in measured.items():
        eventually(lambda port=port: answer_of(port, "/readyz")[0] == 200, 120, message=f"{name} is not ready")
        assert answer_of(port, "/healthz")[0] == 200
        families = {f.name for f in text_string_to_metric_families(answer_of(port, "/metrics")[1])}
        exported = exported_by(name.removesuffix("-2"))
        assert families == {metric.name.removesuffix("_total") for metric in exported}, name
        exposed |= families
    shown_metrics = {name for _, query in queries() for name in re.findall(r"\b(?:tentalis|process)_\w+", query)}
    ends = re.compile(r"_(?:total|bucket|sum|count)$")
    missing = {ends.sub("", name) for name in shown_metrics} - exposed
    assert len(shown_metrics) > 20 and not missing, "no process of the stack exposes what a dashboard shows"
    assert str(measured["trainer"]) in home.run("status").stdout
    by_name = {f.name: f for f in text_string_to_metric_families(answer_of(shown["port"], "/metrics")[1])}
    assert {"tentalis_supervisor_process_state", "tentalis_broker_reachable"} <= by_name.keys()
    assert by_name["tentalis_broker_memory_bytes"].samples[0].value > 1e8
    sizes = {sample.labels["topic"]: sample.value for sample in by_name["tentalis_broker_log_bytes"].samples}
    assert sizes["tentalis.schemas.v1"] > 0 and "__consumer_offsets" in sizes
    laptop.follow(commands_of(ROOT / "docs" / "operations" / "observability.md"))
    operated(home, shown["processes"])
    # Without a bootstrap server named, the running stack of the state directory is the one that is meant.
    assert home.run("topics", "diff").returncode == 0
    again = home.run("up", "--detach", "--policy-model", str(home.model))
    assert (again.returncode, "runs in" in again.stderr) == (1, True)


def ended(home: Home) -> None:
    """Checks that no stack runs, and that its log outlives it."""
    down = home.run("down")
    assert down.returncode == 0 and "no stack runs" in down.stderr, down.stderr
    assert home.run("status").returncode == 1
    # The broker comes back for the one command.
    read = home.run("consume", "tentalis.schemas.v1", "--exit", "-o", "json")
    assert {json.loads(line)["key"] for line in read.stdout.splitlines()} == {
        s.fingerprint.hex() for s in all_current()
    }
    assert "the broker of" in read.stderr
    assert home.run("status").returncode == 1


def operated(home: Home, before: dict[str, Any]) -> None:
    """An operator's actions on single processes of a running stack, and their effects."""

    def now(name: str) -> dict[str, Any]:
        return dict(json.loads((home.path / "status.json").read_text())["processes"][name])

    log, config = Path(before["broker"]["log"]), home.path / "kafka" / "log4j2.xml"
    assert "GroupCoordinator" not in log.read_text()
    assert home.run("log-level", "broker", "INFO").returncode == 0
    time.sleep(2)  # the broker looks each second
    done = home.run("restart", "aggregation-2")
    assert done.returncode == 0 and "aggregation-2 is ready" in done.stderr, done.stderr
    assert "GroupCoordinator" in log.read_text()
    assert home.run("log-level", "broker", "DEFAULT").returncode == 0 and 'Root level="WARN"' in config.read_text()
    assert home.run("log-level", "scoring", "DEBUG").returncode == 0
    broker = before["broker"]["pid"]
    os.kill(broker, signal.SIGSTOP)
    try:
        eventually(lambda: now("broker")["state"] == "unresponsive", 30)
        assert home.run("status").returncode == 1
    finally:
        os.kill(broker, signal.SIGCONT)
    os.kill(before["join"]["pid"], signal.SIGKILL)
    eventually(lambda: now("broker")["state"] == "ready", 60)
    eventually(lambda: now("join")["state"] == "ready" and now("join")["restarts"] == 1, 120)
    events = [json.loads(line) for line in home.run("events", "join", "-o", "json").stdout.splitlines()]
    assert any(each["event"] == "exited" and "SIGKILL" in each["detail"] for each in events)
    eventually(lambda: "the log level is now DEBUG" in home.run("logs", "scoring", "--level", "WARNING").stdout, 30)
    assert now("broker")["pid"] == broker and now("model")["restarts"] == 0
