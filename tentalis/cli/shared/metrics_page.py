"""`python -m tentalis.cli.shared.metrics_page docs/reference/metrics.md`: generates the page of all metrics."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from streams.runtime.metrics import STREAMS
from tentalis.kafka import topology
from tentalis.service.metrics import EVERY_PROCESS, Metric


def modules() -> list[str]:
    """Returns the modules that define metrics, in the order of the page."""
    apps = [f"streams.apps.{application.name}.metrics" for application in topology.streams()]
    return [
        "tentalis.service.metrics",
        "streams.runtime.metrics",
        "streams.fold.metrics",
        *(name for name in apps if find_spec(name.rpartition(".")[0]) and find_spec(name)),
        "tentalis.kafka.metrics",
        "tentalis.gateway.metrics",
        "tentalis.inference.metrics",
        "tentalis.inference.replicas.metrics",
        "tentalis.policies.metrics",
        "tentalis.agents.workers.metrics",
        "tentalis.agents.manager.metrics",
        "tentalis.agents.pool.metrics",
        "trainer.run.metrics",
        "tentalis.local.metrics",
    ]


HEAD = """# Metrics

Written by `python -m tentalis.cli.shared.metrics_page docs/reference/metrics.md` from the `metrics.py` of each part.
Where they are served, `/healthz`, `/readyz` and traces: [observability.md](../operations/observability.md).

Every series is of one process; sum over processes in the query. A histogram has the series `_bucket`, `_sum` and
`_count`. `process_*` exist on Linux only.
"""


def catalogue() -> tuple[Metric, ...]:
    """Returns all metrics, in the order of the modules and of their definitions."""
    found = [metric for name in modules() for metric in defined_in(name)]
    return tuple(dict.fromkeys(found))


def defined_in(module: str) -> list[Metric]:
    """Returns the metrics among the variables of a module."""
    values = [value if isinstance(value, tuple) else (value,) for value in vars(import_module(module)).values()]
    return [item for group in values for item in group if isinstance(item, Metric)]


def exported_by(process: str) -> set[Metric]:
    """Returns the metrics that an application of the topology must export."""
    groups = [EVERY_PROCESS, *([STREAMS] if topology.named(process).stream else [])]
    return {metric for metric in catalogue() if metric.by in groups or process in metric.by}


def markdown() -> str:
    """Returns the page."""
    sections: dict[tuple[str, ...], list[Metric]] = {}
    for metric in catalogue():
        sections.setdefault(metric.by, []).append(metric)
    return "\n".join([HEAD, *(_section(by, metrics) for by, metrics in sections.items())])


def _section(by: tuple[str, ...], metrics: list[Metric]) -> str:
    groups = {
        EVERY_PROCESS: ("Every process", topology.APPLICATIONS),
        STREAMS: ("Stream applications", topology.streams()),
    }
    title, exporters = groups.get(by, (", ".join(by), ()))
    lines = [f"## {title}", ""]
    if exporters:
        lines += [f"Exported by {', '.join(each.name for each in exporters)}.", ""]
    lines += ["| name | kind | labels | unit | what |", "|---|---|---|---|---|", *map(_row, metrics), ""]
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.help} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
