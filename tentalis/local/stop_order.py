"""Stops all processes of the stack in reverse order of dependency, in bounded time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from tentalis.local.process import SupervisedProcess
from tentalis.local.restart import Exit
from tentalis.local.spec import ProcessSpec, depths, upstream


def stop_in_order(
    order: Sequence[ProcessSpec],
    processes: Mapping[str, SupervisedProcess],
    deadline: float,
    gone: Callable[[SupervisedProcess], None],
) -> None:
    """Sends SIGTERM to each process once its dependents have ended, and SIGKILL to those that are too slow.

    Args:
        order: the specs in order of dependency.
        processes: by name.
        deadline: the monotonic time by which all have ended.
        gone: called for each process that has ended.
    """
    depth, needs = depths(order), upstream(order)
    alive = [process for process in processes.values() if process.alive]
    # Seconds reserved per level, so that dependencies get their time after slow dependents.
    reserve = min(1.5, (deadline - time.monotonic()) / (max(depth.values(), default=0) + 2))
    asked: set[str] = set()
    while alive:
        now = time.monotonic()
        for process in alive:
            name = process.spec.name
            if name not in asked and not any(name in needs[other.spec.name] for other in alive):
                asked.add(name)
                _send(process, signal.SIGTERM)
            elif now > deadline - (depth[name] + 0.5) * reserve:
                _send(process, signal.SIGKILL)
        for process in alive:
            assert process.popen is not None
            if (code := process.popen.poll()) is not None:
                process.last_exit = str(Exit(code, now - process.started))
                process.popen = None
                gone(process)
        alive = [process for process in alive if process.alive]
        time.sleep(0.02)


def _send(process: SupervisedProcess, number: signal.Signals) -> None:
    assert process.popen is not None
    process.popen.send_signal(number)
