"""The states of a supervised process, and the rules by which the supervisor's observations become one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tentalis.service.health import RECOVERING

# Seconds for which a process that was ready may say that it is not, before it is shown as degraded: a rebalance, or a
# busy machine, is no trouble.
DEGRADED_AFTER = 10.0


class ProcessState(StrEnum):
    """The state of a process, as `tentalis status` shows it."""

    WAITING = "waiting"
    """It does not run, or cannot work, until something else happens: the message says what."""
    STARTING = "starting"
    """It runs and has not been ready since its start."""
    RECOVERING = "recovering"
    """It restores its state from the log."""
    RUNNING = "running"
    """It runs, ends by itself, and has no health check."""
    READY = "ready"
    """It works."""
    DEGRADED = "degraded"
    """It runs and reports why it cannot do its work."""
    UNRESPONSIVE = "unresponsive"
    """It runs and gives no sign of life."""
    CRASH_LOOPING = "crash-looping"
    """It fails again and again, and is restarted after growing pauses."""
    FAILED = "failed"
    """It ended with an error that a restart cannot fix; an operator restarts it."""
    HALTED = "halted"
    """It stopped by its own decision (exit code 5); an operator restarts it."""
    DONE = "done"
    """It ended by itself, with its work done."""
    STOPPED = "stopped"
    """An operator stopped it, or the whole stack."""


TROUBLED = frozenset(
    (
        ProcessState.DEGRADED,
        ProcessState.UNRESPONSIVE,
        ProcessState.CRASH_LOOPING,
        ProcessState.FAILED,
        ProcessState.HALTED,
    )
)
"""The states in which a process does not do its work and somebody should look: `tentalis status` exits with 1."""


@dataclass(frozen=True, slots=True)
class LiveView:
    """The supervisor's observations of a running process. Times are seconds of an AwakeClock.

    Attributes:
        job: it ends by itself and has no health check.
        was_ready: it has been ready since its start.
        reason: its own words on why it is not ready.
        unready_for: time for which it has not been ready; 0 if it is.
        no_grace: `reason` is a report of its working loop, which is shown immediately.
        silent: the missing sign of life at the last check; empty if there was one.
        silent_for: time without a sign of life.
        paused: ids of its operating-system processes that are stopped by a signal.
        unresponsive_after: time after which silence is shown.
        restarted_after: time after which the supervisor restarts it.
        down: its dependencies that do not answer.
    """

    job: bool = False
    was_ready: bool = False
    reason: str = ""
    unready_for: float = 0.0
    no_grace: bool = False
    silent: str = ""
    silent_for: float = 0.0
    paused: tuple[int, ...] = ()
    unresponsive_after: float = 15.0
    restarted_after: float = 60.0
    down: tuple[str, ...] = ()


def live_state(seen: LiveView) -> tuple[ProcessState, str]:
    """Returns the state of a running process that is not in a crash loop, and the message beside it."""
    if seen.paused:
        pids = " ".join(map(str, seen.paused))
        return ProcessState.UNRESPONSIVE, f"stopped by a signal (SIGSTOP); `kill -CONT {pids}` continues it"
    if seen.job:
        return ProcessState.RUNNING, ""
    if seen.silent and seen.silent_for >= seen.unresponsive_after:
        after = f"restarted after {seen.restarted_after:g} s"
        return ProcessState.UNRESPONSIVE, f"{seen.silent} (for {in_words(seen.silent_for)}; {after})"
    if seen.reason.startswith(RECOVERING):
        return ProcessState.RECOVERING, seen.reason
    if seen.down and seen.unready_for > 0:
        return ProcessState.WAITING, f"waits for {', '.join(seen.down)}"
    if seen.reason and (seen.no_grace or (seen.was_ready and seen.unready_for >= DEGRADED_AFTER)):
        return ProcessState.DEGRADED, seen.reason
    if not seen.was_ready:
        return ProcessState.STARTING, seen.reason or seen.silent
    return ProcessState.READY, seen.reason


def crash_loop_message(failures: int, seconds: float, last_error: str, then: str) -> str:
    """Returns the message of a crash loop: number of failures in how long, the last error, and what comes next."""
    return f"failed {failures} times in {in_words(seconds)}, {then}; last error: {last_error}"


def in_words(seconds: float) -> str:
    """Returns a duration for people, in its largest unit that is not a fraction: 0.2 s, 40 s, 3 min, 2 h, 5 d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
