"""The settings of a Prometheus and a Grafana that watch the local stack.

In: the ports of the running processes, and the alerts and dashboards that `make chart` writes for the local stack. Out:
files by name. Pure, but for reading the package's files.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

EVERY = "15s"
SUPERVISOR = "supervisor"


def targets(ports: Mapping[str, int]) -> str:
    """Returns the targets of the processes, as Prometheus reads them from a file."""
    found = [{"targets": [f"127.0.0.1:{port}"], "labels": {"process": name}} for name, port in sorted(ports.items())]
    return json.dumps(found, indent=1) + "\n"


def settings_files(ports: Mapping[str, int], folder: Path, prometheus: str) -> dict[str, str]:
    """Returns the content of each file by its name in the folder.

    Args:
        ports: the metrics port of each process.
        folder: where the files will be.
        prometheus: the address at which Grafana reaches Prometheus.
    """
    # JSON is YAML, and needs no rules for quoting paths.
    config = {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(folder / "alerts.json")],
        "scrape_configs": [{"job_name": "tentalis", "file_sd_configs": [{"files": [str(folder / "targets.json")]}]}],
    }
    source = {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "access": "proxy", "isDefault": True}
    provider = {"name": "tentalis", "folder": "Tentalis", "type": "file"}
    sources = {"apiVersion": 1, "datasources": [source | {"url": prometheus}]}
    providers = {"apiVersion": 1, "providers": [provider | {"options": {"path": str(folder / "dashboards")}}]}
    package = files("tentalis.local") / "observability"
    return {
        "prometheus.yml": json.dumps(config, indent=1) + "\n",
        "targets.json": targets(ports),
        "alerts.json": (package / "alerts.json").read_text(encoding="utf-8"),
        "grafana/datasources/prometheus.yaml": json.dumps(sources, indent=1) + "\n",
        "grafana/dashboards/tentalis.yaml": json.dumps(providers, indent=1) + "\n",
        **{
            f"dashboards/{each.name}": each.read_text(encoding="utf-8")
            for each in sorted((package / "dashboards").iterdir(), key=lambda each: each.name)
        },
    }
