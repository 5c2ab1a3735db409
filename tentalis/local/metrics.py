"""The metrics of the local stack's supervisor: states and restarts of its processes, the broker, lag per group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tentalis.kafka.lag import LagProbe
from tentalis.local.states import TROUBLED, ProcessState
from tentalis.service.health import Health
from tentalis.service.metrics import Exporter, Metric, MetricKind

_BY = ("supervisor",)

SUPERVISOR_STATE = Metric(
    "tentalis_supervisor_process_state",
    MetricKind.GAUGE,
    "1 for the state that the process is in, 0 for all other states.",
    _BY,
    ("process", "state"),
)
SUPERVISOR_RESTARTS = Metric(
    "tentalis_supervisor_restarts_total",
    MetricKind.COUNTER,
    "Restarts of the process since the stack started.",
    _BY,
    ("process",),
    "restarts",
)
BROKER_REACHABLE = Metric(
    "tentalis_broker_reachable",
    MetricKind.GAUGE,
    "1 if the broker answered the last query for the lag, which reading these metrics causes.",
    _BY,
)
BROKER_MEMORY = Metric(
    "tentalis_broker_memory_bytes",
    MetricKind.GAUGE,
    "Resident memory of the local broker; 0 while it does not run.",
    _BY,
    unit="bytes",
)
BROKER_LOG = Metric(
    "tentalis_broker_log_bytes",
    MetricKind.GAUGE,
    "Bytes on disk of each topic of the local broker, indexes included.",
    _BY,
    ("topic",),
    "bytes",
)
GROUP_LAG = Metric(
    "tentalis_group_lag_records",
    MetricKind.GAUGE,
    "Records that a consumer group has not committed: of the applications, the worker, the policies and the trainer.",
    _BY,
    ("group",),
    "records",
)

Processes = Mapping[str, Mapping[str, Any]]


def supervisor_health(processes: Callable[[], Processes], lag: LagProbe, broker_log: Path | None) -> Health:
    """Returns health and metrics of a supervisor; it is ready if no process is in trouble.

    `broker_log`: the log folder of the local broker, if there is one.
    """
    exporter = Exporter("supervisor")
    exporter.read(SUPERVISOR_STATE, lambda: _states(processes()))
    exporter.read(SUPERVISOR_RESTARTS, lambda: {(name,): one["restarts"] for name, one in processes().items()})

    def is_reachable() -> float:
        lag.ask()
        return float(lag.reachable)

    exporter.read(BROKER_REACHABLE, is_reachable)
    # In a scrape after the line above, which has asked: each question may wait for seconds.
    exporter.read(GROUP_LAG, lambda: {(group,): float(behind) for group, behind in lag.lags.items()})
    if broker_log is not None:
        exporter.read(BROKER_MEMORY, lambda: float(_resident_bytes(processes()["broker"]["pid"])))
        exporter.read(BROKER_LOG, lambda: _topic_bytes(broker_log))
    return Health(exporter, lambda: _trouble(processes()))


def _states(processes: Processes) -> dict[tuple[str, ...], float]:
    return {
        (name, state.value): float(one["state"] == state) for name, one in processes.items() for state in ProcessState
    }


def _resident_bytes(pid: int | None) -> int:
    try:
        text = Path("/proc", str(pid), "statm").read_text(encoding="ascii")
    except OSError:  # it does not run, or this is not Linux
        return 0
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _topic_bytes(folder: Path) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for partition in folder.glob("*-[0-9]*"):
        topic = partition.name.rpartition("-")[0]
        found[topic,] = found.get((topic,), 0.0) + sum(map(_size, partition.glob("*")))
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512  # the broker makes its indexes larger than they are filled
    except FileNotFoundError:  # retention has just removed it
        return 0


def _trouble(processes: Processes) -> str | None:
    return "; ".join(f"{name} is {one['state']}" for name, one in processes.items() if one["state"] in TROUBLED) or None
