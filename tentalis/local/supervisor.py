"""Supervises the processes of the local stack: starts them in order, restarts them, and leaves none behind.

All work happens on one thread of the supervisor. The kernel ties a child's life to the *thread* that started it
(PR_SET_PDEATHSIG), so children must be started by a thread that lives as long as they may.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tentalis.local import logfiles
from tentalis.local.control import ControlError, ControlRequest, ControlServer
from tentalis.local.disk import NO_SPACE
from tentalis.local.disk_watch import DiskWatch
from tentalis.local.events import StackHistory
from tentalis.local.health_check import check_health
from tentalis.local.launcher import ProcessLauncher
from tentalis.local.liveness import AwakeClock
from tentalis.local.process import Life, SupervisedProcess
from tentalis.local.restart import Again, Exit, GiveUp, Halt, decide
from tentalis.local.spec import ProcessSpec, SupervisorError, in_order, upstream
from tentalis.local.state import StateDir, write_whole
from tentalis.local.states import ProcessState, in_words
from tentalis.local.stop_order import stop_in_order
from tentalis.service.exit_codes import ExitCode
from tentalis.service.logs import LEVELS

log = logging.getLogger(__name__)

# Pauses between two rounds: while a process starts, ends or is in trouble, and while all are ready.
_TICK, _TICK_SETTLED = 0.05, 0.25
_CHECK_STARTING = 0.2
# Also the interval until a process that has become ready is seen again, and while one does not answer.
_CHECK_AGAIN = 1.0
_CHECK_READY = 5.0
_STATUS_EVERY = 1.0
# Seconds between SIGTERM and SIGKILL of a hung process, for its last log lines.
_GRACE = 5.0
# Seconds until all processes are gone after a stop request: less than the documented ten.
_STOP_S = 9.0
# Seconds until a failed start is tried again.
_START_AGAIN = 5.0
# Seconds in which a request must reach the supervisor's thread.
_REQUEST_S = 10.0
# The name of the stack itself in the history.
STACK = "stack"
# The log level that a process had at its start.
DEFAULT_LEVEL = "DEFAULT"
_COME = (ProcessState.READY, ProcessState.DONE)


class Supervisor:
    """Runs `specs` until `stop()`. The caller holds the state directory.

    `metrics_port`: where the caller serves the metrics of the supervisor, for the status.

    Raises:
        SupervisorError: names are not unique, are unknown or form a cycle.
    """

    def __init__(self, state: StateDir, specs: Sequence[ProcessSpec], metrics_port: int | None = None) -> None:
        self.state = state
        self.metrics_port = metrics_port
        self._order = in_order(specs)
        self._upstream = upstream(self._order)
        logs = state.folder("logs")
        beats = state.folder("beats")
        self._processes = {
            spec.name: SupervisedProcess(spec, logs / f"{spec.name}.log", beats / spec.name) for spec in self._order
        }
        self._history = StackHistory(state.path)
        self._control: ControlServer | None = None
        self._wake = threading.Event()
        """Ends the pause between two rounds."""
        self._requests: queue.SimpleQueue[tuple[ControlRequest, Future[None]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stop_by: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._checks = ThreadPoolExecutor(max(1, len(specs)), thread_name_prefix="ready")
        self._launcher = ProcessLauncher(state)
        self._disk = DiskWatch(state.path)
        self._written = 0.0
        self._unwritten = False
        self._awake = AwakeClock(time.monotonic())
        self._lost: str | None = None

    # For callers, from any thread.

    def start(self) -> None:
        """Starts the supervision and returns immediately; `wait_ready()` waits.

        Raises:
            SupervisorError: this process does not hold the state directory.
        """
        if self.state.holder() != os.getpid():
            raise SupervisorError(f"acquire the state directory {self.state.path} in this process before start()")
        self._launcher.forget_levels()
        self._thread.start()
        self._control = ControlServer(self.state.path, self.request)

    def status(self) -> dict[str, dict[str, Any]]:
        """Returns the status of each process.

        Keys: state (ProcessState), pid, restarts, uptime in seconds, last_exit, last_error, message, log, port, and
        confirmed: it gave a sign of life after it had become ready. Raises SupervisorError if the supervisor itself
        failed.
        """
        self._raise_error()
        now = time.monotonic()
        return {name: process.status(now) for name, process in self._processes.items()}

    def failure(self) -> str | None:
        """Returns the reason why the stack cannot work, or None.

        Reasons: an essential process was given up before it was ever ready (with the end of its log), or the state
        directory is gone. The failure of any other process is only shown: the others continue.
        """
        self._raise_error()
        if self._lost is not None:
            return self._lost
        return "\n".join(f"{p.spec.name}: {p.message}" for p in self._never_came()) or None

    def unmendable(self) -> bool:
        """Returns True if `failure` is one that a restart cannot fix."""
        self._raise_error()
        return any(process.unmendable for process in self._never_came())

    def failed(self) -> dict[str, str]:
        """Returns name to reason of the processes that ended with an error that a restart cannot fix."""
        return self._in_life(Life.FAILED)

    def halted(self) -> dict[str, str]:
        """Returns name to reason of the processes that stopped deliberately and wait for an operator."""
        return self._in_life(Life.HALTED)

    def broken(self) -> dict[str, str]:
        """Returns name to reason of the processes that are failed or halted, or are still retried after many failures.

        For callers that cannot wait.
        """
        self._raise_error()
        return {name: process.shown[1] for name, process in self._processes.items() if process.broken}

    def request(self, request: ControlRequest) -> dict[str, dict[str, Any]]:
        """Carries out an operator's request on the supervisor's thread; returns the status once it has begun.

        Raises ControlError if the request is refused or the supervisor stops.
        """
        answer: Future[None] = Future()
        self._requests.put((request, answer))
        self._wake.set()
        try:
            answer.result(_REQUEST_S)
        except TimeoutError as error:
            if answer.cancel():
                busy = "the supervisor is stopping or busy, and nothing was done; `tentalis status` shows it"
                raise ControlError(busy) from error
            answer.result(_REQUEST_S)  # it has just begun
        return {name: one for name, one in self.status().items() if name in request.names}

    def _never_came(self) -> list[SupervisedProcess]:
        gone = (Life.FAILED, Life.HALTED)
        return [p for p in self._processes.values() if p.spec.essential and p.life in gone and not p.was_satisfied]

    def _in_life(self, life: Life) -> dict[str, str]:
        self._raise_error()
        return {name: process.message for name, process in self._processes.items() if process.life is life}

    def wait_ready(self, timeout: float, wanted: Sequence[str] | None = None) -> None:
        """Waits until every process, or those wanted, is ready or done.

        Raises:
            SupervisorError: an essential process failed, or `timeout` seconds passed.
        """
        names = list(self._processes) if wanted is None else list(wanted)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_error()
                if failure := self.failure():
                    raise SupervisorError(failure)
                missing = [name for name in names if self._processes[name].shown[0] not in _COME]
                if not missing:
                    return
                if self._stop_by is not None:
                    raise SupervisorError("stopped before everything was ready")
                if time.monotonic() > deadline:
                    states = ", ".join(f"{name} {self._processes[name].shown[0]}" for name in missing)
                    raise SupervisorError(f"not ready in {timeout:g} s: {states}; see {self.state.path / 'logs'}")
                self._changed.wait(0.2)

    def stop(self, timeout: float = _STOP_S) -> None:
        """Stops all processes: SIGTERM in reverse order of dependency, then SIGKILL to those that are too slow.

        All processes and their descendants are gone after `timeout` seconds at most. May be called again, and before
        `start()`.
        """
        with self._changed:
            if self._stop_by is None:
                self._stop_by = time.monotonic() + timeout
        self._wake.set()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._thread.ident is not None:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise SupervisorError(f"the supervisor itself failed: {self._error}") from self._error

    # On the supervisor's thread.

    def _run(self) -> None:
        try:
            self._history.add(STACK, "started")
            while self._stop_by is None:
                self._launcher.keep_keeper()
                if (lost := self.state.lost()) is not None:
                    log.error("%s", lost)
                    self._lost = lost
                    self._stop_all(time.monotonic() + _STOP_S)
                    return
                self._tick()
                with self._changed:
                    self._changed.notify_all()
                if self._wake.wait(_TICK_SETTLED if self._settled() else _TICK):
                    self._wake.clear()
            self._stop_all(self._stop_by)
        except BaseException as error:  # raised to every caller; the children end with this thread
            self._error = error
            log.exception("the supervisor failed")
        finally:
            self._checks.shutdown(wait=False, cancel_futures=True)
            self._launcher.close()

    def _tick(self) -> None:
        self._awake.tick(time.monotonic())
        turned = self._disk.look(time.monotonic())
        for process in self._processes.values():
            if process.log_file in turned:
                process.log_start = 0
        self._carry_out_requests()
        changed = False
        for process in self._processes.values():
            if process.alive:
                self._look_at(process)
            if not process.alive and process.life is Life.PENDING:
                self._start_if_due(process)
            changed |= self._show(process)
        if changed or time.monotonic() - self._written > _STATUS_EVERY:
            self._write_status()
            self._history.flush()

    def _settled(self) -> bool:
        """True if nothing is under way: every process has come, and no operator has asked for anything."""
        return all(process.shown[0] in _COME and not process.wish for process in self._processes.values())

    def _show(self, process: SupervisedProcess) -> bool:
        """Updates the state to show, and the history. Returns True if the state changed."""
        before, _ = process.shown
        process.shown = state, message = process.state(time.monotonic(), self._awake.now, self._down(process))
        if state is before:
            return False
        bad = state in (ProcessState.UNRESPONSIVE, ProcessState.DEGRADED, ProcessState.CRASH_LOOPING)
        log.log(logging.WARNING if bad else logging.DEBUG, "%s is %s: %s", process.spec.name, state, message)
        self._note(process, state, message)
        return True

    def _note(self, process: SupervisedProcess, event: str, detail: str) -> None:
        if self._lost is not None:  # a new directory there may belong to another process
            return
        restarts = max(0, process.starts - 1)
        pid = process.popen.pid if process.popen else None
        self._history.add(process.spec.name, event, (detail.splitlines() or [""])[0], restarts=restarts, pid=pid)

    def _down(self, process: SupervisedProcess) -> list[str]:
        """Returns the direct and indirect dependencies that do not answer."""
        names = self._upstream[process.spec.name]
        return [name for name, other in self._processes.items() if name in names and not other.answering]

    def _look_at(self, process: SupervisedProcess) -> None:
        assert process.popen is not None
        code = process.popen.poll()
        now = time.monotonic()
        # Processes are checked in order of dependency: a failed dependency is already known to be down here.
        if self._down(process):
            process.excused = True
            process.silence.heard(self._awake.now)
        if self._disk.shortage is not None:
            process.silence.heard(self._awake.now)
        if code is not None:
            self._ended(process, code, now)
            return
        if process.kill_at is not None:
            if now >= process.kill_at:
                process.popen.kill()
            return
        if process.has_check:
            self._check(process, now)
            self._end_if_hung(process, now)

    def _check(self, process: SupervisedProcess, now: float) -> None:
        assert process.popen is not None
        if process.check is None:
            if now >= process.next_check:
                mark = self._launcher.mark(process) if process.ready_since is not None else None
                process.check = self._checks.submit(check_health, process.spec, process.beats, process.popen.pid, mark)
            return
        if not process.check.done():
            return
        result = process.check.result()
        process.check = None
        if process.checked(result, now, self._awake.now):
            log.info("%s is ready after %.1f s", process.spec.name, now - process.started)
        settled = process.confirmed and not result.silent and result.ready
        starting = process.ready_since is None
        process.next_check = now + (_CHECK_STARTING if starting else _CHECK_READY if settled else _CHECK_AGAIN)

    def _end_if_hung(self, process: SupervisedProcess, now: float) -> None:
        silent = process.silence.seconds(self._awake.now)
        if silent <= process.silence_limit:
            return
        starting = process.ready_since is None and not process.spec.expect_exit
        process.hung = "was not ready" if starting else "gave no sign of life"
        details = process.seen.silent or process.seen.reason
        process.hung += f" for {silent:.0f} s" + (f" ({details})" if details else "")
        log.warning("%s %s: restarting it", process.spec.name, process.hung)
        self._terminate(process, now)

    def _terminate(self, process: SupervisedProcess, now: float) -> None:
        assert process.popen is not None
        process.kill_at = now + _GRACE
        process.popen.terminate()

    def _carry_out_requests(self) -> None:
        while True:
            try:
                request, answer = self._requests.get_nowait()
            except queue.Empty:
                return
            if not answer.set_running_or_notify_cancel():  # its operator was told that nothing was done
                continue
            try:
                self._carry_out(request)
                answer.set_result(None)
            except ControlError as error:
                answer.set_exception(error)

    def _carry_out(self, request: ControlRequest) -> None:
        unknown = [name for name in request.names if name not in self._processes]
        if unknown:
            raise ControlError(f"the stack has no {', '.join(unknown)}; it has {', '.join(self._processes)}")
        processes = [self._processes[name] for name in request.names]
        match request.action:
            case "status":
                return
            case "stop" | "restart":
                for process in processes:
                    self._wish(process, request.action, request.action)
            case "start":
                for process in processes:
                    if process.wish or not process.alive:
                        self._wish(process, "restart", request.action)
            case "log-level":
                self._set_level(processes, request.level)
            case _:
                raise ControlError(f"the supervisor does not know the request {request.action!r}")

    def _set_level(self, processes: Sequence[SupervisedProcess], level: str) -> None:
        if level not in (*LEVELS, DEFAULT_LEVEL):
            raise ControlError(f"{level} is not a log level: use {', '.join(LEVELS)} or {DEFAULT_LEVEL}")
        if fixed := [process.spec.name for process in processes if not process.spec.log_level]:
            raise ControlError(f"the log level of {', '.join(fixed)} cannot be changed while it runs")
        for process in processes:
            file = self._launcher.level_file(process)
            try:
                if level == DEFAULT_LEVEL:
                    file.unlink(missing_ok=True)
                else:
                    file.write_text(level, encoding="utf-8")
                if process.spec.set_level is not None:
                    process.spec.set_level(None if level == DEFAULT_LEVEL else level)
            except OSError as error:
                raise ControlError(f"cannot set the log level of {process.spec.name}: {error}") from error
            self._note(process, "log-level", level)

    def _wish(self, process: SupervisedProcess, wish: str, asked: str) -> None:
        log.info("%s: an operator asked for `%s`", process.spec.name, asked)
        self._note(process, asked, "an operator asked for it")
        process.forgive()
        if process.alive:
            process.wish = wish
            if process.kill_at is None:
                self._terminate(process, time.monotonic())
        else:
            process.life = Life.PENDING if wish == "restart" else Life.STOPPED
        self._show(process)

    def _ended(self, process: SupervisedProcess, code: int, now: float) -> None:
        spec, no_space = process.spec, self._no_space(process)
        end = Exit(
            code,
            ran=now - process.started,
            ready_for=process.ready_for(now),
            excused=process.excused,
            hung=process.hung,
            no_space=code != 0 and no_space is not None,
            needed=spec.essential and not process.was_satisfied,
        )
        process.ended(end)
        self._launcher.kill_descendants(process)
        if process.wish:
            process.life = Life.PENDING if process.wish == "restart" else Life.STOPPED
            process.wish = process.message = ""
            return
        if spec.expect_exit and code == 0 and not process.hung:
            process.life, process.was_satisfied, process.message = Life.DONE, True, ""
            return
        failures = process.history.exits
        process.history, verdict = decide(spec.policy, process.history, end)
        if process.history.exits == 1 or failures == 0:
            process.failing_since = process.started
        match verdict:
            case Again(delay):
                process.life, process.next_start = Life.PENDING, now + delay
                process.message = f"{end}, restart in {in_words(delay)}" + (f": {no_space}" if end.no_space else "")
            case GiveUp(reason):
                process.life, process.unmendable = Life.FAILED, code == ExitCode.PERMANENT
                process.message = (
                    f"{reason} ({end}): {process.last_error}. Fix the cause, then run `tentalis restart {spec.name}`."
                    f"\nThe end of {process.log_file}:\n{logfiles.tail(process.log_file)}"
                )
            case Halt():
                process.life = Life.HALTED
                process.message = (
                    f"stopped and needs an operator: {process.last_error}. Fix the cause, then run "
                    f"`tentalis restart {spec.name}`. Its log: {process.log_file}"
                )
        told = process.last_error not in ("", str(end))
        self._note(process, "exited", f"{end}: {process.last_error}" if told else str(end))
        log.warning("%s: %s", spec.name, process.message)

    def _start_if_due(self, process: SupervisedProcess) -> None:
        now = time.monotonic()
        if now < process.next_start:
            return
        if waits_for := [name for name in process.spec.after if not self._processes[name].satisfied]:
            process.message = f"waits for {', '.join(waits_for)}"
            return
        if self._disk.shortage is not None:
            process.message = f"waits for disk space: {self._disk.shortage}"
            return
        process.starts += 1
        try:
            popen = self._launcher.spawn(process)
        except OSError as error:  # of the log file or the heartbeat folder, or the system cannot create a process
            process.starts -= 1
            message = f"cannot be started: {error}"
            if message != process.message:
                log.error("%s %s", process.spec.name, message)
            process.next_start, process.message = now + _START_AGAIN, message
            return
        process.begin(popen, now, self._awake.now)

    def _no_space(self, process: SupervisedProcess) -> str | None:
        """Returns a message if the disk is full, or was full for this process; its partial files may be gone by now."""
        said = logfiles.end_of(process.log_file, process.log_start).splitlines()
        return self._disk.shortage or next((line for line in reversed(said) if NO_SPACE in line), None)

    def _stop_all(self, deadline: float) -> None:
        stop_in_order(self._order, self._processes, deadline, self._launcher.kill_descendants)
        for process in self._processes.values():
            if process.life not in (Life.FAILED, Life.HALTED, Life.DONE):
                process.life, process.message = Life.STOPPED, ""
            self._show(process)
        if self._lost is None:
            self._history.add(STACK, "stopped")
            self._write_status()

    def _write_status(self) -> None:
        self._written = time.monotonic()
        content: dict[str, Any] = {"supervisor": os.getpid(), "port": self.metrics_port, "updated": time.time()}
        content["processes"] = self.status()
        try:
            write_whole(self.state.path / "status.json", content)
            self._unwritten = False
        except OSError as error:  # a full disk must not stop the running processes
            if not self._unwritten:
                log.warning("cannot write the status to %s: %s", self.state.path, error)
            self._unwritten = True
