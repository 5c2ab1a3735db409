"""The process of reward functions, as scoring sees it: it starts, is called within limits, is killed, and starts again.

A call that hangs or kills the process costs its own reward only. If the process ends by itself, the calls that were
under way are made again, each in a separate process, so that the one at fault is found.
"""

import contextlib
import linecache
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import tentalis
from tentalis.rewards.functions import frames
from tentalis.rewards.functions.errors import FunctionError, FunctionTimeout, ProcessNotStarted
from tentalis.rewards.functions.output import BoundedOutput
from tentalis.rewards.functions.reply import BadReply, Hello, Reply, read_hello, read_reply
from tentalis.rewards.functions.traceback_text import where_in_fault
from tentalis.rewards.functions.values import Returned

log = logging.getLogger(__name__)
output_log = logging.getLogger("tentalis.rewards.functions.output")
"""Receives the lines that reward functions print."""

START_S = 100.0
"""Time limit of starting, which imports the user's modules, in seconds."""
MAX_TOGETHER = 32
_GRACE_S = 2.0
_DUMP_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """`targets`: FILE:FUNCTION or MODULE:FUNCTION. `folders`: added to the module path. `form`: of completions.
    `returns`: what the functions return, rewards or texts."""

    targets: tuple[str, ...]
    folders: tuple[Path, ...]
    form: str
    memory_mb: int
    returns: Returned = "reward"


class _Ended(Exception):
    """The process ended during a call. `certain`: because of this call, else perhaps because of another or an earlier
    one. `late`: because of the time limit."""

    def __init__(self, message: str, *, certain: bool = False, late: bool = False) -> None:
        super().__init__(message)
        self.certain, self.late = certain, late


class FunctionProcess:
    """Calls functions in a process that is started at the first use, and again after its end. Thread-safe.

    Args:
        check_source: called before each start after the first. Raises if the source is no longer the one that the
            scorer's name stands for.
    """

    def __init__(self, settings: ProcessSettings, check_source: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self.steps = 0
        """Starts and ends of calls so far: progress, for whoever looks for hung scorers."""
        self.check_source = check_source
        self._starting, self._alone = threading.Lock(), threading.Lock()
        self._running: list[_Running] = []
        self._slots: threading.Semaphore | None = None
        self._starts = 0
        weakref.finalize(self, _close, self._running)

    def start(self) -> Hello:
        """Starts the process unless it runs; returns the description of its functions.

        Raises:
            ProcessNotStarted: the functions cannot be loaded.
        """
        return self._current().hello

    def close(self) -> None:
        """Ends the process. A later call starts it again."""
        with self._starting:
            _close(self._running)

    def call(self, call: bytes, limit_s: float) -> Reply:
        """Returns the values of a pickled `Call`. The time limit does not count the wait for other calls or a start.

        Raises:
            FunctionTimeout: a function took longer.
            FunctionError: the process ended.
            ProcessNotStarted: it cannot be started.
        """
        self._current()
        assert self._slots is not None, "the first start sets it"
        with self._slots:
            try:
                return self._call(call, limit_s)
            except _Ended as error:
                kind = FunctionTimeout if error.late else FunctionError
                raise kind(str(error)) from error
            finally:
                self.steps += 1

    def _call(self, call: bytes, limit_s: float) -> Reply:
        try:
            return self._current().call(call, limit_s)
        except _Ended as error:
            if error.certain:
                raise
            log.info("a call is made again in a separate process: %s", error)
        self.steps += 1
        with self._alone:
            running = self._started()
            try:
                return running.call(call, limit_s)
            finally:
                running.kill()

    def _current(self) -> "_Running":
        with self._starting:
            if self._running and self._running[0].usable:
                return self._running[0]
            _close(self._running)
            self._running.append(self._started())
            return self._running[0]

    def _started(self) -> "_Running":
        if self._starts:
            self.check_source()
        running = _Running(self.settings)
        self._starts += 1
        self.steps += 1
        if self._slots is None:
            together = all(each.coroutine for each in running.hello.functions)
            self._slots = threading.Semaphore(MAX_TOGETHER if together else 1)
        return running


class _Running:
    """One run of the process. Raises ProcessNotStarted from the constructor."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._name = ", ".join(Path(target).name for target in settings.targets)
        self._lock, self._files, self._killing = threading.Lock(), threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[Reply]] = {}
        self._number = 0
        self.usable = True
        """False from the moment at which the process is ended, or has ended by itself."""
        self._closed = False
        self._reason = ""
        self._output = BoundedOutput()
        self._output_lock = threading.Lock()
        self._popen, self._requests, self._replies, self._traces = _spawned()
        threading.Thread(target=self._read_output, name="reward output", daemon=True).start()
        try:
            self.hello = self._say_hello()
        except BaseException:
            self.kill()
            self._close_files()
            raise
        threading.Thread(target=self._read_replies, name="reward replies", daemon=True).start()

    def call(self, call: bytes, limit_s: float) -> Reply:
        """Returns the values of a call. Raises FunctionTimeout or _Ended."""
        future: Future[Reply] = Future()
        with self._lock:
            if not self.usable:
                raise _Ended("the process had ended already")
            self._number += 1
            number = self._number
            self._waiting[number] = future
        self._log(self._output_of(lambda output: output.next_call()))
        coroutines = all(each.coroutine for each in self.hello.functions)
        # Coroutines are cancelled in the process; only one that blocks its loop is late here.
        wait_s = limit_s + (_GRACE_S if coroutines else 0.0)
        deadline = time.monotonic() + wait_s
        try:
            self._send(pickle.dumps((number, limit_s, call)), deadline)
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            if future.done():
                return future.result()
            raise self._timed_out(limit_s) from error
        finally:
            with self._lock:
                self._waiting.pop(number, None)
            self._log(self._output_of(lambda output: output.next_call()))

    def kill(self) -> None:
        """Kills the process and everything that it started."""
        with self._killing:
            if self._popen.returncode is None:  # not reaped yet, so that the id is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def _send(self, frame: bytes, deadline: float) -> None:
        with self._files:
            if self._closed:
                return  # the reader of the replies says why
            try:
                frames.write(self._requests, frame, deadline)
            except BrokenPipeError:
                self.kill()  # whatever it started may still hold its replies open

    def _timed_out(self, limit_s: float) -> _Ended:
        with self._lock:
            certain = len(self._waiting) == 1
            self.usable = False
            self._reason = "another call took too long, and the process was ended"
        place = self._place()
        self.kill()
        return _Ended(
            f"{place or self._defined}: the call took longer than {limit_s:g} s and was ended; {_advice(place)}",
            certain=certain,
            late=True,
        )

    def _place(self) -> str:
        """Returns the line at which the function is now."""
        with self._killing, contextlib.suppress(ProcessLookupError):
            if self._popen.returncode is None:
                os.kill(self._popen.pid, signal.SIGUSR1)
        end, dump = time.monotonic() + _DUMP_S, ""
        while time.monotonic() < end:
            dump += self._dump()
            place = where_in_fault(dump, self._folders)
            if place:
                return place
            time.sleep(0.01)
        return ""

    def _dump(self) -> str:
        with self._files:
            if self._closed:
                return ""
            try:
                return os.read(self._traces, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                return ""  # nothing has been written yet

    @property
    def _defined(self) -> str:
        """The places of the functions, for an end whose line is unknown."""
        return ", ".join(f"{each.place} ({each.name})" for each in self.hello.functions)

    @property
    def _folders(self) -> list[Path]:
        files = [Path(each.file).parent for each in self.hello.functions if each.file]
        return [*self._settings.folders, *files]

    def _say_hello(self) -> Hello:
        setup = {
            "targets": list(self._settings.targets),
            "folders": [str(folder) for folder in self._settings.folders],
            "form": self._settings.form,
            "memory_mb": self._settings.memory_mb,
            "returns": self._settings.returns,
        }
        frames.write(self._requests, pickle.dumps(setup), time.monotonic() + START_S)
        timer = threading.Timer(START_S, self.kill)
        timer.daemon = True
        timer.start()
        try:
            frame = frames.read(self._replies, frames.MAX_REPLY)
            if frame is None:
                code = self._popen.wait()
                late = not timer.is_alive() and code == -signal.SIGKILL
                raise ProcessNotStarted(
                    f"{self._name}: the module took longer than {START_S:g} s to import"
                    if late
                    else f"{self._name}: {_exit_text(code, self._settings.memory_mb)} while it imported the module"
                )
            return read_hello(frame)
        except (frames.BadFrame, BadReply) as error:
            raise ProcessNotStarted(f"{self._name}: its process does not speak the protocol: {error}") from error
        finally:
            timer.cancel()

    def _read_replies(self) -> None:
        reason = ""
        try:
            while (frame := frames.read(self._replies, frames.MAX_REPLY)) is not None:
                reply = read_reply(frame)
                with self._lock:
                    future = self._waiting.get(reply.number)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (frames.BadFrame, BadReply, OSError) as error:
            reason = f"its process does not speak the protocol ({error})"
        with self._lock:
            self.usable = False
        self.kill()
        reason = reason or self._reason or _exit_text(self._popen.returncode, self._settings.memory_mb)
        place = where_in_fault(self._dump(), self._folders)
        with self._lock, self._files:
            self._closed = True
            self._close_files()
            waiting = list(self._waiting.values())
        for future in waiting:
            if not future.done():
                future.set_exception(_Ended(f"{place or self._defined}: {reason}"))

    def _read_output(self) -> None:
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        while data := os.read(descriptor, 1 << 16):
            self._log(self._output_of(lambda output, data=data: output.feed(data)))  # type: ignore[misc]
        self._log(self._output_of(lambda output: output.next_call()))
        self._popen.stdout.close()

    def _output_of(self, step: Callable[[BoundedOutput], list[str]]) -> list[str]:
        with self._output_lock:
            return step(self._output)

    def _log(self, lines: Sequence[str]) -> None:
        for line in lines:
            output_log.info("%s prints: %s", self._name, line)

    def _close_files(self) -> None:
        for descriptor in (self._requests, self._replies, self._traces):
            os.close(descriptor)


def _spawned() -> tuple["subprocess.Popen[bytes]", int, int, int]:
    """Starts the process; returns it with this side's ends of its requests, replies and traces."""
    their_requests, requests = os.pipe()
    replies, their_replies = os.pipe()
    traces, their_traces = os.pipe()
    theirs = (their_requests, their_replies, their_traces)
    # The packages of this process, wherever they were imported from.
    paths = [str(Path(tentalis.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "tentalis.rewards.functions.child", *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    os.set_blocking(requests, False)
    os.set_blocking(traces, False)
    return popen, requests, replies, traces


def _advice(place: str) -> str:
    file, _, line = place.rpartition(":")
    if line.isdigit() and linecache.getline(file, int(line)).lstrip().startswith(("import ", "from ")):
        return "move this import to the top of the file, where the limit does not count, or raise time_limit_s"
    return "make the function faster, or raise time_limit_s"


def _exit_text(code: int | None, memory_mb: int) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        advice = f"; if memory ran out, raise memory_mb, which is {memory_mb}" if name in ("SIGKILL", "SIGABRT") else ""
        return f"the process was ended by {name}{advice}"
    return f"the process ended itself with exit code {code}: a reward function must return, not exit"


def _close(running: list[_Running]) -> None:
    while running:
        running.pop().kill()
