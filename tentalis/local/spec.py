"""What is to be supervised, and in which order it starts and stops. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tentalis.local.restart import RestartPolicy


class SupervisorError(RuntimeError):
    """The processes cannot be supervised as told, or one of them does not run. The message says which and why."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to supervise.

    Attributes:
        name: of its log file and in the status.
        argv: program and arguments.
        env: added to the supervisor's environment.
        ready: called now and then on another thread, must return within seconds: whether the process does its work. An
            exception counts as no and is shown in the status. None: ready once started.
        alive: as `ready`, but whether it gives any sign of life at all. None: to be ready is the sign.
        heartbeat: it has a Heart (see tentalis.heartbeat), which is its sign of life, and which must be untroubled for
            it to be ready.
        hang_after: seconds without a sign of life after which it is killed and started again. Time in which the
            supervisor was not awake, or something that it depends on was away, does not count.
        after: names of processes that must be ready (or done) before this one is started; they are stopped after it.
        critical: the stack is of no use without it: if it fails, `Supervisor.failure()` says so.
        expect_exit: it ends by itself, exit code 0 means done; what comes after it waits for that.
        ready_timeout: seconds from start in which it must become ready, or it is killed and started again.
        policy: when to start it again, and when to give up.
        port: where it answers /healthz, /readyz and /metrics, for whoever looks at the status.
    """

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    alive: Callable[[], bool] | None = None
    heartbeat: bool = False
    hang_after: float = 60.0
    after: tuple[str, ...] = ()
    critical: bool = True
    expect_exit: bool = False
    ready_timeout: float = 300.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    port: int | None = None


def in_order(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """The specs so that each comes after those it depends on.

    Raises:
        SupervisorError: names that are not unique, unknown or go in a circle.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise SupervisorError(f"process names must be unique: {', '.join(sorted(names))}")
    ordered: list[ProcessSpec] = []
    left = list(specs)
    while left:
        placed = {spec.name for spec in ordered}
        free = [spec for spec in left if placed.issuperset(spec.after)]
        if not free:
            wants = "; ".join(f"{spec.name} after {', '.join(spec.after)}" for spec in left)
            raise SupervisorError(f"processes wait for unknown ones or for each other: {wants}")
        ordered += free
        left = [spec for spec in left if spec.name not in {other.name for other in free}]
    return ordered


def upstream(ordered: Sequence[ProcessSpec]) -> dict[str, frozenset[str]]:
    """Per process, all that it depends on over any number of steps."""
    found: dict[str, frozenset[str]] = {}
    for spec in ordered:
        found[spec.name] = frozenset(spec.after).union(*(found[name] for name in spec.after))
    return found


def depths(ordered: Sequence[ProcessSpec]) -> dict[str, int]:
    """Per process, how many must stop one after another once it has stopped: the longest chain of its dependencies."""
    found: dict[str, int] = {}
    for spec in ordered:
        found[spec.name] = max((found[name] + 1 for name in spec.after), default=0)
    return found
