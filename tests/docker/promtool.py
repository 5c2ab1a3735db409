"""Prometheus' own checks of the configuration, the alerts and the queries of the dashboards, by promtool."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.docker.engine import say
from tests.docker.go_modules import build_program, require_go, write_module
from tests.support import ROOT

PROMETHEUS, VERSION = "github.com/prometheus/prometheus", "v0.305.0"
"""The module of Prometheus 3.5.0, the version of docker-compose.yml."""
CHART = ROOT / "helm" / "tentalis"
HELM = Path(sys.executable).with_name("helm")


def built(cache: Path) -> Path:
    """Returns the program, built from its Go module the first time. Raises NotAvailable without Go."""
    return _built(cache, "promtool")


def prometheus_program(cache: Path) -> Path:
    """Returns Prometheus, built from its Go module the first time, without its pages. Raises NotAvailable without
    Go."""
    return _built(cache, "prometheus")


def _built(cache: Path, name: str) -> Path:
    folder = cache / f"promtool-{VERSION}"
    program = folder / name
    if not program.exists():
        require_go(f"to build {name} of Prometheus")
        say(f"building {name} from its Go module: 2 to 5 minutes on two cores, once")
        build_program(write_module(folder / "module", {PROMETHEUS: VERSION}), f"{PROMETHEUS}/cmd/{name}", program)
    return program


def rules() -> str:
    """Returns the groups of alerts as the chart renders them."""
    values = ("-f", str(CHART / "ci" / "monitoring-values.yaml"), "--show-only", "templates/monitoring.yaml")
    done = subprocess.run([HELM, "template", "demo", str(CHART), *values], capture_output=True, text=True, check=True)
    found = [each["spec"] for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "PrometheusRule"]
    return yaml.safe_dump({"groups": [group for spec in found for group in spec["groups"]]})


def queries() -> Iterator[tuple[str, str]]:
    """Yields the place and the expression of each query of a dashboard."""
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def problems(program: Path) -> list[str]:
    """Returns what promtool refuses."""

    def refused(where: str, *arguments: str) -> list[str]:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        return [f"{where}: {(done.stdout + done.stderr).strip()}"] if done.returncode else []

    with tempfile.TemporaryDirectory() as folder:
        alerts = Path(folder) / "alerts.yml"
        alerts.write_text(rules(), encoding="utf-8")
        found = refused("alerts of the chart", "check", "rules", str(alerts))
    found += refused("deploy/prometheus", "check", "config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))
    for where, expression in queries():
        found += refused(where, "--experimental", "promql", "format", expression)
    return found
