"""One health check of a supervised process: readiness, sign of life, and processes that a signal has stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tentalis.local import child
from tentalis.local.spec import NotReady, ProcessSpec
from tentalis.service.health import RECOVERING, WAITING
from tentalis.service.heartbeat import Beats


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a health check.

    Attributes:
        ready: the process can do its work.
        reason: the process's own reason why it is not ready.
        silent: describes the missing sign of life; empty if there was one.
        reported: `reason` comes from the working loop.
        beating: it has written its first heartbeat.
        paused: ids of its operating-system processes that are stopped by a signal.
    """

    ready: bool
    reason: str = ""
    silent: str = ""
    reported: bool = False
    beating: bool = False
    paused: tuple[int, ...] = ()

    @property
    def in_order(self) -> bool:
        """True if it says that it restores its state or waits for another process."""
        return self.reason.startswith((RECOVERING, WAITING))


def check_health(spec: ProcessSpec, beats: Beats | None, pid: int, mark: str | None) -> CheckResult:
    """Runs the health check of a process. May take seconds: call it on a separate thread.

    Args:
        spec: the process.
        beats: its heartbeats, if it has a heart.
        pid: its process id.
        mark: the mark in the environment of the process and its descendants, to find those that are stopped if it is
            silent. None: only `pid` is looked at, since this reads the environment of every process of the machine.
    """
    try:
        found = _by_port(spec) if beats is None else _by_heart(spec, beats)
    except Exception as error:  # noqa: BLE001 - any error means no answer and is shown in the status
        found = CheckResult(False, silent=f"{type(error).__name__}: {error}")
    looked_at = child.marked(mark) if found.silent and mark is not None else [pid]
    return replace(found, paused=tuple(each for each in looked_at if _is_stopped(each)))


def _by_port(spec: ProcessSpec) -> CheckResult:
    ready, reason = _readiness(spec)
    alive = ready or bool(reason) if spec.alive is None else _lives(spec.alive)
    return CheckResult(ready, reason, "" if alive else "does not answer")


def _by_heart(spec: ProcessSpec, beats: Beats) -> CheckResult:
    trouble, silent = beats.trouble(), beats.silent()
    missing = f"rank {', '.join(silent)} sent no heartbeat" if silent else ""
    if trouble is None:
        return CheckResult(False)
    if trouble:
        return CheckResult(False, trouble, missing, reported=True, beating=True)
    ready, reason = _readiness(spec)
    return CheckResult(ready, reason, missing, beating=True)


def _readiness(spec: ProcessSpec) -> tuple[bool, str]:
    try:
        return spec.ready is None or spec.ready(), ""
    except NotReady as error:
        return False, str(error)


def _lives(alive: Callable[[], bool]) -> bool:
    try:
        return alive()
    except NotReady:  # it answers that it does not live
        return False


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
