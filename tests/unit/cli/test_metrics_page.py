"""The page of all metrics: it lists every definition, and every process exports what it lists."""

import ast
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tentalis.agents.workers import metrics as worker_metrics
from tentalis.cli.shared.metrics_page import catalogue, defined_in, exported_by, markdown, modules
from tentalis.kafka.topology import APPLICATIONS
from tentalis.service.health import Health
from tentalis.service.metrics import Metric, MetricKind
from tests.support import ROOT
from tests.support.exporters import exporter_of

PAGE = ROOT / "docs" / "reference" / "metrics.md"
UNITS = ("seconds", "bytes", "ratio")


@pytest.mark.parametrize("process", [each.name for each in APPLICATIONS])
def test_each_process_exports_what_the_catalogue_says_of_it(process: str) -> None:
    exporter = exporter_of(process)
    health = Health(exporter, lambda: None)
    wanted = exported_by(process)
    assert {m.name for m in exporter.bound} == {m.name for m in wanted}
    by_name = {m.name.removesuffix("_total"): m for m in wanted}
    found = {f.name: f for f in text_string_to_metric_families(health.answer("/metrics").body.decode())}
    assert set(found) == set(by_name)
    for name, family in found.items():
        assert (family.type, family.documentation) == (by_name[name].kind.value, by_name[name].help)
        for series in family.samples:
            assert series.labels.keys() - {"le"} == set(by_name[name].labels)


def test_each_metric_is_exported_by_some_process_and_named_as_prometheus_wants() -> None:
    names = [m.name for m in catalogue()]
    assert len(set(names)) == len(names)
    assert len(names) > 130
    for metric in catalogue():
        assert metric.by != () or metric in defined_in("tentalis.service.metrics"), metric.name
        assert re.fullmatch(r"(tentalis|process)(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert metric.help.endswith(".") and not metric.help.startswith(" "), metric.name
        for unit in UNITS:
            in_name = metric.name.removesuffix("_total").endswith(f"_{unit}")
            assert in_name == (metric.unit == unit), f"{metric.name} is in {metric.unit}"


def test_the_page_is_what_the_catalogue_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run `python -m tentalis.cli.shared.metrics_page docs/reference/metrics.md`"
    )


def test_every_module_that_defines_a_metric_is_listed() -> None:
    files = [file for part in ("streams", "tentalis", "trainer") for file in (ROOT / part).rglob("*.py")]
    texts = {file: text for file in files if "Metric(" in (text := file.read_text(encoding="utf-8"))}
    defining = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Metric"
    }
    assert defining == set(modules())


def test_a_new_metric_needs_its_definition_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Metric("tentalis_worker_naps_total", MetricKind.COUNTER, "Naps taken.", ("worker",), unit="naps")
    monkeypatch.setattr(worker_metrics, "WORKER_NAPS", new, raising=False)
    assert new in exported_by("worker") and new not in exported_by("manager")
    assert "| `tentalis_worker_naps_total` | counter |  | naps | Naps taken. |\n" in markdown()
