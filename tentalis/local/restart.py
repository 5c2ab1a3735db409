"""Decides if and when an ended process is restarted. Pure: no clock, no process."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tentalis.service.exit_codes import ExitCode

_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays and limits of restarts. Times are in seconds.

    A process that fails is restarted for as long as the stack runs: after `first_delay`, twice that, and so on up to
    `longest_delay`. Being ready for `healthy_after` ends the series. From `loop_after` failures in a series on, the
    process is in a crash loop; after `attempts` failures, callers that cannot wait may count it as broken.

    A kill from outside is not the fault of the process, so its delay stays `first_delay`. From `kills_limit` kills in a
    series on, something (most often the kernel, out of memory) does not let it run, and kills count as failures.
    """

    first_delay: float = 0.2
    longest_delay: float = 300.0
    space_delay: float = 10.0
    healthy_after: float = 60.0
    loop_after: int = 3
    attempts: int = 8
    kills_limit: int = 30


@dataclass(frozen=True, slots=True)
class History:
    """Counts of a process's failures and kills since it was last healthy."""

    exits: int = 0
    kills: int = 0

    def loops(self, policy: RestartPolicy) -> bool:
        """Returns True if the process is in a crash loop."""
        return self.exits >= policy.loop_after

    def broken(self, policy: RestartPolicy) -> bool:
        """Returns True if further attempts are unlikely to help."""
        return self.exits >= policy.attempts


@dataclass(frozen=True, slots=True)
class Exit:
    """One exit of a process.

    Attributes:
        code: exit code, or the negated number of the signal that ended it.
        ran: seconds from start to end.
        ready_for: seconds for which it was ready before the exit, 0 if it never was.
        excused: a dependency was down while it ran, so the exit does not count against the process.
        hung: reason why the supervisor killed it: not ready in time, or no sign of life. Empty if it did not.
        no_space: the disk was full, so the exit does not count against the process.
        needed: the stack cannot start without this process, and it has never been ready.
    """

    code: int
    ran: float
    ready_for: float = 0.0
    excused: bool = False
    hung: str = ""
    no_space: bool = False
    needed: bool = False

    @property
    def killed(self) -> bool:
        """True if a signal from outside ended it."""
        return self.code in _KILLED and not self.hung

    def __str__(self) -> str:
        if self.hung:
            return f"killed after {self.ran:.1f} s: {self.hung}"
        if self.code >= 0:
            return f"exit code {self.code} after {self.ran:.1f} s"
        return f"ended by {signal.Signals(-self.code).name} after {self.ran:.1f} s"


@dataclass(frozen=True, slots=True)
class Again:
    """Verdict: restart the process after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Verdict: do not restart the process until an operator asks for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Verdict: the process stopped deliberately and waits for an operator."""


def decide(policy: RestartPolicy, history: History, end: Exit) -> tuple[History, Again | GiveUp | Halt]:
    """Returns the updated history and the verdict for one exit of a process."""
    if end.code == ExitCode.NEEDS_OPERATOR and not end.hung:
        return history, Halt()
    if end.code == ExitCode.PERMANENT and not end.hung:
        return history, GiveUp("a restart cannot fix it")
    if end.ready_for >= policy.healthy_after:
        history = History()
    if end.no_space:
        return history, Again(policy.space_delay)
    if end.excused:
        return history, Again(policy.first_delay)
    if end.killed:
        history = History(history.exits, history.kills + 1)
        if history.kills < policy.kills_limit:
            return history, Again(policy.first_delay)
    history = History(history.exits + 1, history.kills)
    if end.needed and history.broken(policy):
        return history, GiveUp(f"failed {history.exits} times at the first start")
    return history, Again(min(policy.longest_delay, policy.first_delay * 2.0 ** (history.exits - 1)))
