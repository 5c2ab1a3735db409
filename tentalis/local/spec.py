"""Specifications of supervised processes, and their order of start and stop. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tentalis.local.restart import RestartPolicy

# Part of `hang_after` after which a silent process is shown as unresponsive: long before it is restarted.
_UNRESPONSIVE = 0.25


class NotReady(Exception):
    """Raised by a readiness check: the process answers that it is not ready, and why."""


class SupervisorError(RuntimeError):
    """The specifications are invalid, or a process does not run. The message names the process and the cause."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to supervise.

    Attributes:
        name: name in the status and of its log file.
        argv: program and arguments.
        env: added to the supervisor's environment.
        ready: readiness check, called repeatedly on another thread; must return within seconds. Raises NotReady with
            the process's own reason. Any other exception counts as no answer and is shown in the status. None: ready
            once started.
        alive: liveness check, called like `ready`. None: `ready` is the liveness check too.
        heartbeat: the process has a Heart (`tentalis.service.heartbeat`), its sign of life; it is ready only if its
            Heart has reported no trouble, and `ready` agrees.
        hang_after: seconds without a sign of life after which it is killed and restarted. Time in which the supervisor
            was not awake or a dependency was down does not count.
        after: names of processes that must be ready (or done) before this one starts; they are stopped after it.
        essential: nothing can start without it: if it fails permanently before it was ever ready (or done),
            `Supervisor.failure()` reports that. The failure of any other process, or a later one, is only shown.
        expect_exit: it ends by itself, with exit code 0 when done; its dependents wait for that.
        ready_timeout: seconds from start to ready, after which it is killed and restarted.
        policy: restart delays and limits.
        port: port of /healthz, /readyz and /metrics, shown in the status.
        log_level: it follows changes of its log level while it runs (`tentalis.service.logs`).
        set_level: how a process that does not follow by itself is told its new level; None is the level of its start.
            Raises OSError.
    """

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    alive: Callable[[], bool] | None = None
    heartbeat: bool = False
    hang_after: float = 60.0
    after: tuple[str, ...] = ()
    essential: bool = False
    expect_exit: bool = False
    ready_timeout: float = 300.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    port: int | None = None
    log_level: bool = False
    set_level: Callable[[str | None], None] | None = None

    @property
    def unresponsive_after(self) -> float:
        """Seconds without a sign of life after which it is shown as unresponsive."""
        return self.hang_after * _UNRESPONSIVE


def in_order(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Returns the specs in order of dependency.

    Raises:
        SupervisorError: names are not unique, are unknown or form a cycle.
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
    """Returns all direct and indirect dependencies per process."""
    found: dict[str, frozenset[str]] = {}
    for spec in ordered:
        found[spec.name] = frozenset(spec.after).union(*(found[name] for name in spec.after))
    return found


def depths(ordered: Sequence[ProcessSpec]) -> dict[str, int]:
    """Returns the length of the longest chain of dependencies per process: these stop one after another once it has."""
    found: dict[str, int] = {}
    for spec in ordered:
        found[spec.name] = max((found[name] + 1 for name in spec.after), default=0)
    return found
