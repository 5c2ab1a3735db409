"""The supervisor's record of one process: its life, the results of its health checks, and the state that follows."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any

from tentalis.local import logfiles
from tentalis.local.health_check import CheckResult
from tentalis.local.liveness import Silence
from tentalis.local.restart import Exit, History
from tentalis.local.spec import ProcessSpec
from tentalis.local.states import LiveView, ProcessState, crash_loop_message, in_words, live_state
from tentalis.service.heartbeat import Beats


class Life(Enum):
    """The stage of a supervised process: not started yet, started, or ended in one of four ways."""

    PENDING = "to be started"
    ALIVE = "started"
    FAILED = "failed"
    HALTED = "halted"
    DONE = "done"
    STOPPED = "stopped"


_ENDED = {
    Life.FAILED: ProcessState.FAILED,
    Life.HALTED: ProcessState.HALTED,
    Life.DONE: ProcessState.DONE,
    Life.STOPPED: ProcessState.STOPPED,
}


class SupervisedProcess:
    """One process. The supervisor's thread changes it; `status` may be called from any thread.

    Attributes:
        life: what the supervisor has done with it.
        message: reason of its end, or why it is not started.
        ready_since: time at which it became ready after its start; None if it has not.
        was_satisfied: dependents could have started at some time since the supervisor runs.
        confirmed: it gave a sign of life after it had become ready.
        wish: `stop` or `restart` while an operator's request ends it.
        failing_since: time of the start that began the current series of failures.
        last_error: the line in which it reported its last failure.
    """

    def __init__(self, spec: ProcessSpec, log_file: Path, beats: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self.log_start = 0
        self.beats = Beats(beats) if spec.heartbeat else None
        self.life = Life.PENDING
        self.popen: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.started = 0.0
        self.ready_since: float | None = None
        self.was_satisfied = False
        self.confirmed = False
        self.next_start = 0.0
        self.wish = ""
        self.kill_at: float | None = None
        self.hung = ""
        self.excused = False
        self.history = History()
        self.failing_since = 0.0
        self.unmendable = False
        self.last_exit: str | None = None
        self.last_error = ""
        self.message = ""
        self.silence = Silence(0.0)
        self.unready_since: float | None = None
        self.seen = CheckResult(False)
        self.check: Future[CheckResult] | None = None
        self.next_check = 0.0
        self.shown: tuple[ProcessState, str] = (ProcessState.WAITING, "")

    @property
    def alive(self) -> bool:
        return self.popen is not None

    @property
    def satisfied(self) -> bool:
        """True if dependents may start."""
        if self.life is Life.DONE:
            return True
        return (
            self.life is Life.ALIVE and self.ready_since is not None and not self.spec.expect_exit and self.seen.ready
        )

    @property
    def answering(self) -> bool:
        """True if this process answers, so that a dependent cannot blame its own silence on it."""
        return self.satisfied and not self.seen.silent

    @property
    def has_check(self) -> bool:
        return self.beats is not None or not self.spec.expect_exit

    @property
    def silence_limit(self) -> float:
        """Seconds of silence after which it is restarted."""
        starting = self.ready_since is None and not self.spec.expect_exit
        return self.spec.ready_timeout if starting else self.spec.hang_after

    @property
    def loops(self) -> bool:
        return self.history.loops(self.spec.policy)

    @property
    def broken(self) -> bool:
        """True if it failed permanently, or failed so often that a caller that cannot wait may give up."""
        return self.life in (Life.FAILED, Life.HALTED) or (self.loops and self.history.broken(self.spec.policy))

    def begin(self, popen: subprocess.Popen[bytes], now: float, awake: float) -> None:
        """Records a start."""
        self.popen, self.life, self.message = popen, Life.ALIVE, ""
        self.started, self.ready_since, self.next_check = now, None, now
        self.confirmed, self.excused, self.hung = False, False, ""
        self.seen, self.unready_since = CheckResult(self.spec.ready is None and self.beats is None), awake
        self.silence.heard(awake)

    def checked(self, result: CheckResult, now: float, awake: float) -> bool:
        """Records the result of a health check. Returns True if the process has just become ready."""
        became_ready = False
        self.seen = result
        if result.ready:
            self.unready_since = None
            self.was_satisfied = True
            if self.ready_since is None:
                self.ready_since, became_ready = now, True
            elif not result.silent:
                self.confirmed = True
        elif self.unready_since is None:
            self.unready_since = awake
        # While it starts, being alive is not enough, unless its working loop beats or it says why it is not ready yet.
        if not result.silent and (result.ready or self.ready_since is not None or result.beating or result.in_order):
            self.silence.heard(awake)
        # A series of failures ends when the process has been ready for long enough.
        if self.history != History() and self.ready_for(now) >= self.spec.policy.healthy_after:
            self.history = History()
        return became_ready

    def ended(self, end: Exit) -> None:
        """Records an exit."""
        self.popen, self.check, self.kill_at = None, None, None
        self.seen = CheckResult(False)
        self.last_exit = str(end)
        if self.wish:
            return
        if end.hung or end.killed:
            self.last_error = end.hung or str(end)
        elif end.code != 0:
            self.last_error = logfiles.last_words(self.log_file, self.log_start)

    def ready_for(self, now: float) -> float:
        """Returns the seconds since it became ready."""
        return 0.0 if self.ready_since is None else now - self.ready_since

    def forgive(self) -> None:
        """Ends a series of failures, because an operator has asked for a start: delays and counts begin again."""
        self.history, self.unmendable, self.next_start, self.message = History(), False, 0.0, ""

    def state(self, now: float, awake: float, down: Sequence[str]) -> tuple[ProcessState, str]:
        """Returns the state to show, with its message. `down`: its dependencies that do not answer."""
        if self.life in _ENDED:
            return _ENDED[self.life], self.message
        if self.wish:
            return ProcessState.WAITING, f"ends: an operator asked for `{self.wish}`"
        if self.loops:
            return ProcessState.CRASH_LOOPING, self._loop_message(now)
        if self.life is Life.PENDING:
            return ProcessState.WAITING, self.message
        return live_state(
            LiveView(
                job=not self.has_check,
                was_ready=self.ready_since is not None,
                reason=self._reason(),
                unready_for=0.0 if self.unready_since is None else max(1e-9, awake - self.unready_since),
                no_grace=self.seen.reported,
                silent=self.seen.silent,
                silent_for=self.silence.seconds(awake),
                paused=self.seen.paused,
                unresponsive_after=min(self.spec.unresponsive_after, self.silence_limit),
                restarted_after=self.silence_limit,
                down=tuple(down),
            )
        )

    def _reason(self) -> str:
        if (
            self.seen.reason
            or self.seen.ready
            or self.seen.silent
            or self.ready_since is None
            or self.beats is not None
        ):
            return self.seen.reason
        return "does not answer its readiness check"

    def _loop_message(self, now: float) -> str:
        if self.alive:
            then = f"running again for {in_words(now - self.started)}"
        elif self.next_start > now:
            then = f"next start in {in_words(self.next_start - now)}"
        else:
            then = self.message or "starting again"
        error = self.last_error
        if self.history.kills >= self.spec.policy.kills_limit:
            error += "; unless a person killed it, the machine is out of memory (see the kernel's log)"
        return crash_loop_message(self.history.exits, now - self.failing_since, error, then)

    def status(self, now: float) -> dict[str, Any]:
        """Returns its entry in the status."""
        popen = self.popen  # read once: the supervisor's thread may set it to None
        state, message = self.shown
        return {
            "state": state.value,
            "pid": popen.pid if popen else None,
            "restarts": max(0, self.starts - 1),
            "uptime": round(now - self.started, 1) if popen else None,
            "last_exit": self.last_exit,
            "last_error": self.last_error or None,
            "confirmed": self.confirmed,
            "message": message,
            "log": str(self.log_file),
            "port": self.spec.port,
        }
