"""Supervises the processes of the local stack: starts them in order, restarts what ends, and leaves nothing behind.

Everything happens on one thread of the supervisor's own. That is not only simple: a child's life is tied to the
*thread* that started it (PR_SET_PDEATHSIG), so the thread that starts must be one that lives as long as they may.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tentalis.local import child
from tentalis.local.restart import Again, Exit, GiveUp, History, decide
from tentalis.local.spec import ProcessSpec, SupervisorError, depths, in_order, upstream
from tentalis.local.state import StateDir, write_whole

log = logging.getLogger(__name__)

_TICK = 0.05
_CHECK_STARTING = 0.2
_CHECK_READY = 5.0
_STATUS_EVERY = 1.0
_LOG_LIMIT = 10 * 2**20
_TAIL_LINES = 15


class _Process:
    """What is known of one process. States: waiting, starting, ready (running, for one that
    ends by itself), backoff, failed, done, stopped."""

    def __init__(self, spec: ProcessSpec, log_file: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self.state = "waiting"
        self.popen: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.started = 0.0
        self.ready_since: float | None = None
        self.next_start = 0.0
        self.history = History()
        self.excused = self.hung = False
        self.last_exit: str | None = None
        self.message = ""
        self.check: Future[bool] | None = None
        self.next_check = 0.0

    @property
    def satisfied(self) -> bool:
        return self.state == "done" or (self.state == "ready" and not self.spec.expect_exit)

    @property
    def alive(self) -> bool:
        return self.popen is not None

    def status(self, now: float) -> dict[str, Any]:
        popen = self.popen  # once: the supervisor's thread may take it away
        return {
            "state": self.state,
            "pid": popen.pid if popen else None,
            "restarts": max(0, self.starts - 1),
            "uptime": round(now - self.started, 1) if popen else None,
            "last_exit": self.last_exit,
            "message": self.message,
            "log": str(self.log_file),
        }


class Supervisor:
    """Runs `specs` until `stop()`. The caller holds the state directory.

    Raises:
        SupervisorError: names that are not unique, unknown or go in a circle.
    """

    def __init__(self, state: StateDir, specs: Sequence[ProcessSpec]) -> None:
        self.state = state
        self._order = in_order(specs)
        self._upstream = upstream(self._order)
        logs = state.folder("logs")
        self._processes = {spec.name: _Process(spec, logs / f"{spec.name}.log") for spec in self._order}
        self._changed = threading.Condition()
        self._stop_by: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._checks = ThreadPoolExecutor(max(1, len(specs)), thread_name_prefix="ready")
        self._keeper: subprocess.Popen[bytes] | None = None
        self._written = 0.0

    # What callers use, from any thread.

    def start(self) -> None:
        """Begin. Returns at once; `wait_ready()` waits.

        Raises:
            SupervisorError: this process does not hold the state directory.
        """
        if self.state.holder() != os.getpid():
            raise SupervisorError(f"hold the state directory {self.state.path} before supervising in it")
        self._thread.start()

    def status(self) -> dict[str, dict[str, Any]]:
        """Per process: state (waiting | starting | ready | backoff | failed | done | stopped), pid, restarts, uptime in
        seconds, last_exit, message, log. Raises what ended the supervisor itself, if that happened."""
        self._raise_error()
        now = time.monotonic()
        return {name: process.status(now) for name, process in self._processes.items()}

    def failure(self) -> str | None:
        """Why the stack cannot work, if a critical process was given up, with the end of its log; else None."""
        self._raise_error()
        failed = [p for p in self._processes.values() if p.state == "failed" and p.spec.critical]
        return "\n".join(f"{p.spec.name}: {p.message}" for p in failed) or None

    def wait_ready(self, timeout: float, wanted: Sequence[str] | None = None) -> None:
        """Wait until every process, or those wanted, is ready or done.

        Raises:
            SupervisorError: a critical one failed, or `timeout` seconds went by.
        """
        names = list(self._processes) if wanted is None else list(wanted)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_error()
                if failure := self.failure():
                    raise SupervisorError(failure)
                missing = [name for name in names if self._processes[name].state not in ("ready", "done")]
                if not missing:
                    return
                if self._stop_by is not None:
                    raise SupervisorError("stopped before everything was ready")
                if time.monotonic() > deadline:
                    states = ", ".join(f"{name} {self._processes[name].state}" for name in missing)
                    raise SupervisorError(f"not ready in {timeout:g} s: {states}; see {self.state.path / 'logs'}")
                self._changed.wait(0.2)

    def stop(self, timeout: float = 10.0) -> None:
        """Stop everything: SIGTERM to whoever nobody running depends on, and so on downwards; SIGKILL to the slow.

        All gone, with every descendant, after `timeout` seconds at most. May be called again, and before `start()`.
        """
        with self._changed:
            if self._stop_by is None:
                self._stop_by = time.monotonic() + timeout
        if self._thread.ident is not None:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise SupervisorError(f"the supervisor itself failed: {self._error}") from self._error

    # What the thread does.

    def _run(self) -> None:
        try:
            while self._stop_by is None:
                self._keep_keeper()
                self._tick()
                with self._changed:
                    self._changed.notify_all()
                time.sleep(_TICK)
            self._stop_all(self._stop_by)
        except BaseException as error:  # shown to every caller; the children end with this thread
            self._error = error
            log.exception("the supervisor failed")
        finally:
            self._checks.shutdown(wait=False, cancel_futures=True)
            if self._keeper is not None:
                assert self._keeper.stdin is not None
                self._keeper.stdin.close()
                self._keeper.wait()

    def _tick(self) -> None:
        changed = False
        for process in self._processes.values():
            before = process.state
            if process.alive:
                self._look_at(process)
            if not process.alive and process.state in ("waiting", "backoff"):
                self._start_if_due(process)
            changed |= process.state != before
        if changed or time.monotonic() - self._written > _STATUS_EVERY:
            self._write_status()

    def _look_at(self, process: _Process) -> None:
        assert process.popen is not None
        code = process.popen.poll()
        now = time.monotonic()
        # The processes are looked at in order of dependency: what took this one along is known to be down by now.
        if not all(self._processes[name].satisfied for name in self._upstream[process.spec.name]):
            process.excused = True
        if code is not None:
            self._ended(process, code, now)
            return
        if process.spec.expect_exit:
            return
        self._check_readiness(process, now)
        if process.state == "starting" and now - process.started > process.spec.ready_timeout:
            log.warning("%s was not ready within %g s: killed", process.spec.name, process.spec.ready_timeout)
            process.hung = True
            process.popen.kill()

    def _check_readiness(self, process: _Process, now: float) -> None:
        if process.spec.ready is None:
            self._answered(process, True, now)
        elif process.check is None:
            if now >= process.next_check:
                process.check = self._checks.submit(process.spec.ready)
        elif process.check.done():
            error = process.check.exception()
            answer = error is None and process.check.result()
            process.message = f"the readiness check raised {type(error).__name__}: {error}" if error else ""
            process.check = None
            self._answered(process, answer, now)

    def _answered(self, process: _Process, answer: bool, now: float) -> None:
        if answer and process.state == "starting":
            process.state, process.ready_since = "ready", now
            log.info("%s is ready after %.1f s", process.spec.name, now - process.started)
        elif not answer and process.state == "ready" and not process.message:
            process.message = "does not answer its readiness check"
        process.next_check = now + (_CHECK_READY if process.state == "ready" else _CHECK_STARTING)

    def _ended(self, process: _Process, code: int, now: float) -> None:
        spec = process.spec
        end = Exit(
            code,
            ran=now - process.started,
            ready_for=now - process.ready_since if process.ready_since else 0.0,
            excused=process.excused,
            hung=process.hung,
        )
        process.popen, process.check, process.last_exit = None, None, str(end)
        child.kill_marked(self._mark(process))  # what it started must not outlive it, nor hold its ports
        if spec.expect_exit and code == 0:
            process.state, process.message = "done", ""
            return
        process.history, verdict = decide(spec.policy, process.history, end)
        match verdict:
            case Again(delay):
                process.state, process.next_start = "backoff", now + delay
                process.message = f"{end}, again in {delay:.1f} s"
            case GiveUp(reason):
                process.state = "failed"
                process.message = f"{reason} (last: {end}). The end of {process.log_file}:\n{_tail(process.log_file)}"
        log.warning("%s: %s", spec.name, process.message)

    def _start_if_due(self, process: _Process) -> None:
        now = time.monotonic()
        waits_for = [name for name in process.spec.after if not self._processes[name].satisfied]
        if now < process.next_start:
            return
        if waits_for:
            process.state, process.message = "waiting", f"waits for {', '.join(waits_for)}"
            return
        process.starts += 1
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **process.spec.env,
            child.MARK: self._mark(process),
        }
        with _open_log(process.log_file) as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(process.spec.argv)}\n".encode())
            output.flush()
            process.popen = subprocess.Popen(
                [*child.command(), "exec", str(os.getpid()), *process.spec.argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone, which stops them in order
            )
        # What ends by itself is never ready: nothing waits for its being up, only for its end.
        process.state, process.message = ("running" if process.spec.expect_exit else "starting"), ""
        process.started, process.ready_since, process.next_check = now, None, now
        process.excused = process.hung = False

    def _mark(self, process: _Process) -> str:
        return f"{self.state.mark}{process.spec.name}/{process.starts}/"

    def _keep_keeper(self) -> None:
        """Have the process that ends everything if we are killed ourselves (see child.py)."""
        if self._keeper is not None and self._keeper.poll() is None:
            return
        self._keeper = subprocess.Popen(
            [*child.command(), "keep", self.state.mark],
            env={name: value for name, value in os.environ.items() if name != child.MARK},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _stop_all(self, deadline: float) -> None:
        depth = depths(self._order)
        alive = [process for process in self._processes.values() if process.alive]
        # What is lower must still get its time after what is higher has used up its own.
        reserve = min(1.5, (deadline - time.monotonic()) / (max(depth.values(), default=0) + 2))
        asked: set[str] = set()
        while alive:
            now = time.monotonic()
            for process in alive:
                name = process.spec.name
                if name not in asked and not any(name in self._upstream[other.spec.name] for other in alive):
                    asked.add(name)
                    _signal(process, signal.SIGTERM)
                elif now > deadline - (depth[name] + 0.5) * reserve:
                    _signal(process, signal.SIGKILL)
            for process in alive:
                assert process.popen is not None
                if (code := process.popen.poll()) is not None:
                    process.last_exit = str(Exit(code, now - process.started))
                    process.popen = None
                    child.kill_marked(self._mark(process))
            alive = [process for process in alive if process.alive]
            time.sleep(0.02)
        for process in self._processes.values():
            if process.state not in ("failed", "done"):
                process.state, process.message = "stopped", ""
        self._write_status()

    def _write_status(self) -> None:
        self._written = time.monotonic()
        content = {"supervisor": os.getpid(), "updated": time.time(), "processes": self.status()}
        try:
            write_whole(self.state.path / "status.json", content)
        except OSError as error:  # a full disk is no reason to end what still runs
            log.warning("cannot write the status to %s: %s", self.state.path, error)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """While inside, SIGINT, SIGTERM and SIGHUP set the event and do nothing else. For the main thread of a command."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(process: _Process, number: signal.Signals) -> None:
    assert process.popen is not None
    process.popen.send_signal(number)


def _open_log(path: Path) -> IO[bytes]:
    if path.exists() and path.stat().st_size > _LOG_LIMIT:
        path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        return "\n".join(deque(file.read().decode(errors="replace").splitlines(), maxlen=_TAIL_LINES))
