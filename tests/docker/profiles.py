"""Services of the profiles `observability` and `registry` beside a running stack: started, and asked what they have.

Prometheus has every process as a target that answers, metrics of each, and the alerts. The collector has written spans
of worker and gateway. The registry takes the schemas under the URL that .env.example shows.
"""

from __future__ import annotations

import json
import re
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from schemas.wire.avro import all_current
from schemas.wire.registry import SUBJECT_PREFIX
from tests.docker.engine import say, wait_for
from tests.docker.stack import Stack
from tests.support import ROOT, compose

SERVICES = ("prometheus", "otel-collector", "registry")
PORTS = ("PROMETHEUS_PORT", "REGISTRY_PORT")
SEEN_S = 300.0
"""Seconds in which all targets must answer, and spans arrive."""
SPANS_OF = {"tentalis-worker", "tentalis-gateway"}


def example(name: str) -> str:
    """Returns the value that .env.example shows for a variable."""
    found = re.search(rf"^#{name}=(http://\S+)$", (ROOT / ".env.example").read_text("utf-8"), re.MULTILINE)
    assert found is not None, f".env.example shows no {name}"
    return found[1]


def scraped(running: Iterable[str]) -> set[str]:
    """Returns the services that deploy/prometheus/prometheus.yml names, of those that run."""
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    return {name for job in jobs for each in job["dns_sd_configs"] for name in each["names"]} & {*running}


def tried(stack: Stack) -> tuple[dict[str, int], list[str]]:
    """Starts the services, asks them, and removes them. Returns what was seen, and what is missing."""
    say(f"starting {', '.join(SERVICES)}")
    stack("up", "--detach", "--wait", *SERVICES, timeout=600)
    seen, missing = _registered(stack)
    stack("rm", "--stop", "--force", "registry")
    for ask in (_watched, _traced):
        numbers, problems = ask(stack)
        seen |= numbers
        missing += problems
    stack("rm", "--stop", "--force", *SERVICES)
    return seen, missing


def _watched(stack: Stack) -> tuple[dict[str, int], list[str]]:
    """Asks Prometheus for its targets, the alerts and the metrics of each process."""
    url = f"http://127.0.0.1:{stack.variables['PROMETHEUS_PORT']}/api/v1"
    wanted = scraped(compose.active(compose.project()["services"]))

    def answering() -> set[str]:
        targets = _json(f"{url}/targets?state=active")["data"]["activeTargets"]
        return {each["labels"]["service"] for each in targets if each["health"] == "up"}

    def with_metrics() -> set[str]:
        query = urllib.parse.quote('count by (service) ({__name__=~"tentalis_.+"})')
        return {each["metric"]["service"] for each in _json(f"{url}/query?query={query}")["data"]["result"]}

    found = []
    for what, ask in (("target that answers", answering), ("metrics", with_metrics)):
        try:
            wait_for(f"Prometheus has {what} of each process", SEEN_S, lambda ask=ask: wanted <= ask())
        except TimeoutError:
            found.append(f"Prometheus has no {what} of {sorted(wanted - ask())}")
    groups = json.loads((ROOT / "deploy" / "prometheus" / "alerts.json").read_text("utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    loaded = {rule["name"] for group in _json(f"{url}/rules?type=alert")["data"]["groups"] for rule in group["rules"]}
    found += [f"Prometheus has the alerts {sorted(loaded)}"] if loaded != alerts else []
    return {"targets": len(answering()), "alerts": len(loaded)}, found


def _traced(stack: Stack) -> tuple[dict[str, int], list[str]]:
    """Reads the spans that the collector has written."""
    spans: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.jsonl"

        def written() -> bool:
            stack("cp", "otel-collector:/var/lib/otel/traces.jsonl", str(file), check=False)
            spans.update(_spans(file.read_text("utf-8") if file.exists() else ""))
            return spans.keys() >= SPANS_OF

        try:
            wait_for(f"spans of {', '.join(sorted(SPANS_OF))}", SEEN_S, written)
        except TimeoutError:
            return {"spans": sum(spans.values())}, [f"the collector has spans of {sorted(spans)} alone"]
    return {"spans": sum(spans.values()), "services with spans": len(spans)}, []


def _spans(text: str) -> dict[str, int]:
    """Returns the number of spans by service. A last line that is not whole is left out."""
    found: dict[str, int] = {}
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        for each in json.loads(line)["resourceSpans"]:
            attributes = {one["key"]: one["value"].get("stringValue") for one in each["resource"]["attributes"]}
            number = sum(len(scope["spans"]) for scope in each["scopeSpans"])
            name = str(attributes["service.name"])
            found[name] = found.get(name, 0) + number
    return found


def _registered(stack: Stack) -> tuple[dict[str, int], list[str]]:
    """Registers the schemas from a container, and asks the registry for their subjects."""
    inside = replace(stack, variables={**stack.variables, "SCHEMA_REGISTRY_URL": example("SCHEMA_REGISTRY_URL")})
    inside("run", "--rm", "--no-deps", "topics", "schemas", "register", timeout=300)
    path = urllib.parse.urlsplit(inside.variables["SCHEMA_REGISTRY_URL"]).path
    subjects = set(_json(f"http://127.0.0.1:{stack.variables['REGISTRY_PORT']}{path}/subjects"))
    missing = {SUBJECT_PREFIX + schema.name for schema in all_current()} - subjects
    return {"subjects": len(subjects)}, [f"the registry lacks {sorted(missing)}"] if missing else []


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)
