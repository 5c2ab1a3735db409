"""Makes Grafana dashboards from short lists of panels. Pure."""

from __future__ import annotations

from typing import Any

WIDTH, HEIGHT = 8, 7
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(name: str, description: dict[str, Any], process: str = "pod") -> dict[str, Any]:
    """Returns the JSON model of a dashboard.

    Args:
        name: the end of its uid.
        description: `title`, and `panels`: each with `title`, `queries` (legend to expression) and a `unit`.
        process: the label that names a process, in the place of `{{pod}}` in legends.
    """
    return {
        "uid": f"tentalis-{name}",
        "title": description["title"],
        "tags": ["tentalis"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
            ]
        },
        "panels": [_panel(number, panel, process) for number, panel in enumerate(description["panels"])],
    }


def _panel(number: int, panel: dict[str, Any], process: str) -> dict[str, Any]:
    per_row = 24 // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel["title"],
        "datasource": _SOURCE,
        "gridPos": {
            "x": WIDTH * (number % per_row),
            "y": HEIGHT * (number // per_row),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short"), "min": panel.get("min")}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "legendFormat": legend.replace("{{pod}}", f"{{{{{process}}}}}"),
                "expr": expression,
            }
            for index, (legend, expression) in enumerate(panel["queries"].items())
        ],
    }
