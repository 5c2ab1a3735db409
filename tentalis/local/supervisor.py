"""Supervises the processes of the local stack: starts them in order, restarts what ends, and leaves nothing behind.

Everything happens on one thread of the supervisor's own. That is not only simple: a child's life is tied to the
*thread* that started it (PR_SET_PDEATHSIG), so the thread that starts must be one that lives as long as they may.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tentalis.heartbeat import VARIABLE, Beats
from tentalis.local import child, logfiles
from tentalis.local.disk import FULL, NO_SPACE, space
from tentalis.local.liveness import AwakeClock, Silence
from tentalis.local.restart import Again, Exit, GiveUp, Halt, History, decide
from tentalis.local.spec import ProcessSpec, SupervisorError, depths, in_order, upstream
from tentalis.local.state import StateDir, write_whole
from tentalis.service import UNMENDABLE

log = logging.getLogger(__name__)

_TICK = 0.05
_CHECK_STARTING = 0.2
_CHECK_READY = 5.0
_STATUS_EVERY = 1.0
_SPACE_EVERY = 1.0
# A shorter silence is nothing to speak of: a micro-batch, a busy machine.
_SILENCE_SHOWN = 15.0
# What is told to end because it hangs has this long for its last words.
_GRACE = 5.0
# All are gone this long after they are asked to stop: within the ten seconds that people are promised.
_STOP_S = 9.0
# How soon a start that the system refused is tried again.
_START_AGAIN = 5.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a look at a process gave. `trouble`: in its own words; `silent`: what of it gives no sign of life."""

    ready: bool
    trouble: str = ""
    silent: str = ""


class _Process:
    """What is known of one process. States: waiting, starting, ready (running, for one that ends by itself), degraded
    (it works, and says itself what keeps it from being ready), backoff, failed, halted, done, stopped."""

    def __init__(self, spec: ProcessSpec, log_file: Path, beats: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self.log_start = 0
        self.beats = Beats(beats) if spec.heartbeat else None
        self.silence = Silence(0.0)
        self.silent = ""
        self.kill_at: float | None = None
        self.unmendable = False
        self.state = "waiting"
        self.popen: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.started = 0.0
        self.ready_since: float | None = None
        self.next_start = 0.0
        self.history = History()
        self.excused = False
        self.hung = ""
        self.last_exit: str | None = None
        self.message = ""
        self.check: Future[_Answer] | None = None
        self.next_check = 0.0

    @property
    def satisfied(self) -> bool:
        return self.state == "done" or (self.state == "ready" and not self.spec.expect_exit)

    @property
    def answering(self) -> bool:
        return self.satisfied and not self.silent

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
            "port": self.spec.port,
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
        beats = state.folder("beats")
        self._processes = {
            spec.name: _Process(spec, logs / f"{spec.name}.log", beats / spec.name) for spec in self._order
        }
        self._changed = threading.Condition()
        self._stop_by: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._checks = ThreadPoolExecutor(max(1, len(specs)), thread_name_prefix="ready")
        self._keeper: subprocess.Popen[bytes] | None = None
        self._written = 0.0
        self._unwritten = False
        self._awake = AwakeClock(time.monotonic())
        self._shortage: str | None = None
        self._log_trouble = ""
        self._lost: str | None = None
        self._looked_at_disk = float("-inf")

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
        """Per process: state (waiting | starting | ready | running | degraded | backoff | failed | halted | done |
        stopped), pid, restarts, uptime in seconds, last_exit, message, log. Raises what ended the supervisor itself, if
        that happened."""
        self._raise_error()
        now = time.monotonic()
        return {name: process.status(now) for name, process in self._processes.items()}

    def failure(self) -> str | None:
        """Why the stack cannot work: a critical process was given up (with the end of its log), or the state directory
        is gone. Else None."""
        self._raise_error()
        if self._lost is not None:
            return self._lost
        failed = [p for p in self._processes.values() if p.state == "failed" and p.spec.critical]
        return "\n".join(f"{p.spec.name}: {p.message}" for p in failed) or None

    def unmendable(self) -> bool:
        """Whether a critical process was given up because no restart can mend it."""
        self._raise_error()
        return any(p.unmendable for p in self._processes.values() if p.spec.critical)

    def halted(self) -> dict[str, str]:
        """What stopped by its own decision and waits for a person: name to reason. The rest runs on."""
        self._raise_error()
        return {name: process.message for name, process in self._processes.items() if process.state == "halted"}

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

    def stop(self, timeout: float = _STOP_S) -> None:
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
                if (lost := self.state.lost()) is not None:
                    log.error("%s", lost)
                    self._lost = lost
                    self._stop_all(time.monotonic() + _STOP_S)
                    return
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
        self._awake.tick(time.monotonic())
        self._look_at_disk()
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
        if not all(self._processes[name].answering for name in self._upstream[process.spec.name]):
            process.excused = True
            process.silence.heard(self._awake.now)
        if self._shortage is not None:
            process.silence.heard(self._awake.now)
        if code is not None:
            self._ended(process, code, now)
            return
        if process.beats is None and process.spec.expect_exit:
            return
        self._check(process, now)
        self._end_if_hung(process, now)

    def _check(self, process: _Process, now: float) -> None:
        if process.check is None:
            if now >= process.next_check:
                process.check = self._checks.submit(_look, process.spec, process.beats)
        elif process.check.done():
            answer = process.check.result()
            process.check = None
            self._answered(process, answer, now)

    def _answered(self, process: _Process, answer: _Answer, now: float) -> None:
        before = process.message
        starting = process.state == "starting"
        process.silent = answer.silent
        process.message = answer.trouble
        if answer.ready:
            if process.state != "ready":
                process.state, process.ready_since = "ready", now
                log.info("%s is ready after %.1f s", process.spec.name, now - process.started)
        elif answer.trouble:
            process.state = "degraded"
            if answer.trouble != before:
                log.warning("%s: %s", process.spec.name, answer.trouble)
        elif process.state == "ready" and not answer.silent:
            process.message = "does not answer its readiness check"
        # Until it is ready, to be alive is not enough: something must come of it within the time it has for that.
        if not answer.silent and (answer.ready or answer.trouble or not starting):
            process.silence.heard(self._awake.now)
        elif answer.silent and (seconds := process.silence.seconds(self._awake.now)) > _SILENCE_SHOWN:
            limit = process.spec.ready_timeout if starting else process.spec.hang_after
            process.message = f"{answer.silent} (for {seconds:.0f} s; after {limit:g} s it is started again)"
        process.next_check = now + (_CHECK_STARTING if process.state == "starting" else _CHECK_READY)

    def _end_if_hung(self, process: _Process, now: float) -> None:
        assert process.popen is not None
        if process.kill_at is not None:
            if now >= process.kill_at:
                process.popen.kill()
            return
        spec, silent = process.spec, process.silence.seconds(self._awake.now)
        starting = process.state == "starting"
        if silent <= (spec.ready_timeout if starting else spec.hang_after):
            return
        process.hung = "was not ready" if starting else "gave no sign of life"
        process.hung += f" for {silent:.0f} s" + (f" ({process.silent})" if process.silent else "")
        log.warning("%s %s: it is ended and started again", spec.name, process.hung)
        process.kill_at = now + _GRACE
        process.popen.terminate()

    def _look_at_disk(self) -> None:
        now = time.monotonic()
        if now - self._looked_at_disk < _SPACE_EVERY:
            return
        self._looked_at_disk = now
        try:
            shortage = space(self.state.path).shortage(FULL)
        except OSError as error:
            shortage = f"{self.state.path} cannot be used: {error}"
        if (shortage is None) != (self._shortage is None):
            if shortage is None:
                log.warning("there is room in %s again: everything goes on", self.state.path)
            else:
                log.error("%s: what ends is not started again before there is room", shortage)
        self._shortage = shortage
        self._bound_logs()

    def _bound_logs(self) -> None:
        turned, trouble = logfiles.turn_over(self.state.path / "logs")
        for process in self._processes.values():
            if process.log_file in turned:
                process.log_start = 0
        if trouble and trouble != self._log_trouble:
            log.warning("%s", trouble)
        self._log_trouble = trouble

    def _ended(self, process: _Process, code: int, now: float) -> None:
        spec, no_space = process.spec, self._no_space(process)
        end = Exit(
            code,
            ran=now - process.started,
            ready_for=now - process.ready_since if process.ready_since else 0.0,
            excused=process.excused,
            hung=process.hung,
            no_space=code != 0 and no_space is not None,
        )
        process.popen, process.check, process.last_exit = None, None, str(end)
        process.silent, process.kill_at = "", None
        try:
            child.kill_marked(self._mark(process))  # what it started must not outlive it, nor hold its ports
        except TimeoutError as error:  # in the kernel, waiting for a disk: no reason to end everything else
            log.error("%s: %s", spec.name, error)
        if spec.expect_exit and code == 0 and not process.hung:
            process.state, process.message = "done", ""
            return
        process.history, verdict = decide(spec.policy, process.history, end)
        match verdict:
            case Again(delay):
                process.state, process.next_start = "backoff", now + delay
                process.message = f"{end}, again in {delay:.1f} s" + (f": {no_space}" if end.no_space else "")
            case GiveUp(reason):
                process.state, process.unmendable = "failed", code == UNMENDABLE
                words = _last_words(process.log_file, process.log_start)
                process.message = (
                    f"{reason} ({end}): {words}\nThe end of {process.log_file}:\n{_tail(process.log_file)}"
                )
            case Halt():
                process.state = "halted"
                words = _last_words(process.log_file, process.log_start)
                process.message = (
                    f"stopped and needs a person: {words}. When the cause is mended, `tentalis down` and `tentalis up` "
                    f"start it again. Its log: {process.log_file}"
                )
        log.warning("%s: %s", spec.name, process.message)

    def _start_if_due(self, process: _Process) -> None:
        now = time.monotonic()
        waits_for = [name for name in process.spec.after if not self._processes[name].satisfied]
        if now < process.next_start:
            return
        if waits_for:
            process.state, process.message = "waiting", f"waits for {', '.join(waits_for)}"
            return
        if self._shortage is not None:
            process.state, process.message = "waiting", f"waits for room: {self._shortage}"
            return
        process.starts += 1
        try:
            process.popen = self._spawn(process)
        except OSError as error:  # of the log, of the heartbeat, or the system has no process to give
            process.starts -= 1
            message = f"cannot be started: {error}"
            if message != process.message:
                log.error("%s %s", process.spec.name, message)
            process.state, process.next_start, process.message = "backoff", now + _START_AGAIN, message
            return
        # What ends by itself is never ready: nothing waits for its being up, only for its end.
        process.state, process.message = ("running" if process.spec.expect_exit else "starting"), ""
        process.started, process.ready_since, process.next_check = now, None, now
        process.excused, process.hung = False, ""
        process.silence.heard(self._awake.now)

    def _spawn(self, process: _Process) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **process.spec.env,
            child.MARK: self._mark(process),
        }
        if process.beats is not None:
            process.beats.clear()
            environment[VARIABLE] = str(process.beats.folder)
        with _open_log(process.log_file) as output:
            process.log_start = output.tell()
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(process.spec.argv)}\n".encode())
            output.flush()
            return subprocess.Popen(
                [*child.command(), "exec", str(os.getpid()), *process.spec.argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone, which stops them in order
            )

    def _no_space(self, process: _Process) -> str | None:
        """In what words the disk is full, or was to this process: what it had begun to write may be gone by now."""
        said = _said(process.log_file, process.log_start).splitlines()
        return self._shortage or next((line for line in reversed(said) if NO_SPACE in line), None)

    def _mark(self, process: _Process) -> str:
        return f"{self.state.own_mark}{process.spec.name}/{process.starts}/"

    def _keep_keeper(self) -> None:
        """Have the process that ends everything if we are killed ourselves (see child.py)."""
        if self._keeper is not None and self._keeper.poll() is None:
            return
        self._keeper = subprocess.Popen(
            [*child.command(), "keep", self.state.own_mark],
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
                    try:
                        child.kill_marked(self._mark(process))
                    except TimeoutError as error:  # the others are to be stopped all the same
                        log.error("%s: %s", process.spec.name, error)
            alive = [process for process in alive if process.alive]
            time.sleep(0.02)
        for process in self._processes.values():
            if process.state not in ("failed", "halted", "done"):
                process.state, process.message = "stopped", ""
        self._write_status()

    def _write_status(self) -> None:
        if self._lost is not None:  # what is in its place may be another's
            return
        self._written = time.monotonic()
        content = {"supervisor": os.getpid(), "updated": time.time(), "processes": self.status()}
        try:
            write_whole(self.state.path / "status.json", content)
            self._unwritten = False
        except OSError as error:  # a full disk is no reason to end what still runs
            if not self._unwritten:
                log.warning("cannot write the status to %s: %s", self.state.path, error)
            self._unwritten = True


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


@contextmanager
def signals_unwind() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP end the command as Ctrl-C does: what it has begun is undone on the way out."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(process: _Process, number: signal.Signals) -> None:
    assert process.popen is not None
    process.popen.send_signal(number)


def _open_log(path: Path) -> IO[bytes]:
    return path.open("ab")


def _look(spec: ProcessSpec, beats: Beats | None) -> _Answer:
    """On a thread of the pool: asks a process how it is."""
    try:
        if beats is not None:
            trouble, silent = beats.trouble(), beats.silent()
            ranks = f"rank {', '.join(silent)} stands still" if silent else ""
            ready = trouble == "" and not spec.expect_exit and (spec.ready is None or spec.ready())
            return _Answer(ready, trouble or "", ranks)
        ready = spec.ready is None or spec.ready()
        alive = ready if spec.alive is None else spec.alive()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer, and is shown
        return _Answer(False, silent=f"{type(error).__name__}: {error}")
    return _Answer(ready, silent="" if alive else "does not answer")


def _said(path: Path, start: int = 0) -> str:
    """The end of a log, of what was written to it from `start` on; that it is gone is not worth an error."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - 16_384))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"


def _tail(path: Path) -> str:
    return "\n".join(deque(_said(path).splitlines(), maxlen=_TAIL_LINES))


def _last_words(path: Path, start: int) -> str:
    """The line with which a process said why it ended, else the last one."""
    lines = [line.strip() for line in _said(path, start).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ") or " CRITICAL " in line]
    return (told or lines or ["it said nothing"])[-1].rstrip(".")
