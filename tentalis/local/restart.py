"""Whether and when a process that ended is started again. Pure: no clock, no process."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tentalis.service import NEEDS_PERSON, UNMENDABLE

_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds.

    A process that was ready for `healthy_after` is forgiven everything before. Until then, exits of its own doing wait
    `first_delay`, twice that, and so on up to `longest_delay`, and `exits_limit` of them are a crash loop; so are
    `quick_limit` in a row that each came within `quick` of the start. To be killed from outside is no fault of the
    process, so that only waits `first_delay`; but `kills_limit` kills without a healthy time mean that something (most
    often the kernel, for want of memory) will not let it run.
    """

    first_delay: float = 0.2
    longest_delay: float = 10.0
    healthy_after: float = 30.0
    exits_limit: int = 8
    quick: float = 5.0
    quick_limit: int = 5
    kills_limit: int = 30


@dataclass(frozen=True, slots=True)
class History:
    """What counts against a process since it was last healthy."""

    exits: int = 0
    quick: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """One end of a process.

    Attributes:
        code: exit code, or minus the signal that ended it.
        ran: seconds from start to end.
        ready_for: seconds it had been ready at the end, 0 if it never was.
        excused: something it depends on was down while it ran, so the end says nothing about the process.
        hung: why the supervisor killed it: it did not become ready in time, or gave no sign of life any more.
        no_space: the disk was full, so the end says nothing about the process either.
    """

    code: int
    ran: float
    ready_for: float = 0.0
    excused: bool = False
    hung: str = ""
    no_space: bool = False

    def __str__(self) -> str:
        if self.hung:
            return f"killed after {self.ran:.1f} s: {self.hung}"
        if self.code >= 0:
            return f"exit code {self.code} after {self.ran:.1f} s"
        return f"ended by {signal.Signals(-self.code).name} after {self.ran:.1f} s"


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """It stopped by its own decision: do not start it again until a person has looked. What else runs can go on."""


def decide(policy: RestartPolicy, history: History, end: Exit) -> tuple[History, Again | GiveUp | Halt]:
    """Judge one end of a process: what now counts against it, and what to do."""
    if end.code == NEEDS_PERSON and not end.hung:
        return history, Halt()
    if end.code == UNMENDABLE and not end.hung:
        return history, GiveUp("a restart cannot mend it")
    if end.ready_for >= policy.healthy_after:
        history = History()
    if end.no_space:
        return history, Again(policy.longest_delay)
    if end.excused:
        return history, Again(policy.first_delay)
    if end.code in _KILLED and not end.hung:
        history = History(history.exits, history.quick, history.kills + 1)
        if history.kills >= policy.kills_limit:
            return history, GiveUp(
                f"killed {history.kills} times without having been healthy for {policy.healthy_after:g} s in between; "
                "if nobody killed it, the machine is out of memory (see the kernel's log)"
            )
        return history, Again(policy.first_delay)
    quick = history.quick + 1 if end.ran < policy.quick else 0
    history = History(history.exits + 1, quick, history.kills)
    if history.quick >= policy.quick_limit:
        return history, GiveUp(f"ended {history.quick} times in a row within {policy.quick:g} s of its start")
    if history.exits >= policy.exits_limit:
        return history, GiveUp(
            f"ended {history.exits} times without having been healthy for {policy.healthy_after:g} s in between"
        )
    return history, Again(min(policy.longest_delay, policy.first_delay * 2.0 ** (history.exits - 1)))
