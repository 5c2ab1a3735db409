"""State directory of a local installation: an exclusive lock, remembered ports, atomically written files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tentalis.local.child import MARK, kill_marked, marks
from tentalis.local.ports import free_port, port_is_free
from tentalis.service.ports import listener_of

log = logging.getLogger(__name__)

_LAST_MOMENT = 3.0
_ANEW = "Stop the stack (`tentalis down`), remove this file, and start again with `tentalis up`, which writes it anew"

FOLDERS = ("kafka", "logs", "checkpoints", "adapters", "reports")


class StateDirError(RuntimeError):
    """The state directory cannot be used. The message has the holder or the cause, and the remedy."""


class StateDir:
    """The folder `.tentalis/`: `lock`, `ports.json`, `status.json` and folders for Kafka's data, logs, checkpoints etc.

    `with StateDir(path) as state:` holds it exclusively. Reading it does not require holding it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[str] | None = None

    @property
    def mark(self) -> str:
        """Prefix of the marks in the environment of all processes that belong to this directory."""
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16] + "/"

    @property
    def own_mark(self) -> str:
        """Prefix of the marks of processes that this process starts.

        It includes the process id and start time, because after the directory is removed and created again, another
        process may also hold it.
        """
        return f"{self.mark}{os.getpid()}-{_born(os.getpid())}/"

    def lost(self) -> str | None:
        """Returns a message if the directory held by this process was removed or replaced, else None.

        Only for the holder. If the directory cannot be read for another reason, it counts as held.
        """
        assert self._lock is not None
        try:
            there, held = (self.path / "lock").stat(), os.fstat(self._lock.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return f"the state directory {self.path} was removed. All processes of the stack are stopped"
        except OSError:
            return None
        if os.path.samestat(there, held):
            return None
        return (
            f"the state directory {self.path} was removed, and another one was created in its place. "
            "All processes of the old one are stopped"
        )

    def folder(self, name: str) -> Path:
        """Returns a folder inside, created if missing."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def acquire(self) -> None:
        """Takes the lock for the life of this process, creates the folders and kills leftovers of a killed run.

        Raises:
            StateDirError: another process holds the directory, or it is not writable.
        """
        try:
            for name in FOLDERS:
                self.folder(name)
            lock = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise StateDirError(
                f"cannot use the state directory {self.path}: {error}. Set TENTALIS_HOME to another one."
            ) from error
        if not _locked_within(lock, 0.5):  # `holder()` takes the lock for a moment to test it
            lock.close()
            raise StateDirError(
                f"the state directory {self.path} is in use by {self._described_holder()}. "
                "Stop it with `tentalis down`, or set TENTALIS_HOME to another directory."
            )
        lock.truncate(0)
        holder = {"pid": os.getpid(), "born": _born(os.getpid()), "command": " ".join(sys.argv), "since": time.time()}
        lock.write(json.dumps(holder))
        lock.flush()
        self._lock = lock
        if not os.environ.get(MARK, "").startswith(self.mark):  # we are not a leftover ourselves
            try:
                leftovers = self._kill_leftovers()
            except TimeoutError as error:
                self.release()
                raise StateDirError(f"processes of an earlier run in {self.path} cannot be killed: {error}") from error
            if leftovers:
                log.warning("killed %d processes left over by an earlier run: %s", len(leftovers), leftovers)

    def _kill_leftovers(self) -> list[int]:
        """Kills the processes of dead holders. A live one has lost the directory and stops its own processes."""
        killed: list[int] = []
        for holder in {mark.removeprefix(self.mark).partition("/")[0] for mark in marks(self.mark)}:
            pid, _, born = holder.partition("-")
            lives = pid.isdecimal() and str(_born(int(pid))) == born
            if not lives or pid == str(os.getpid()):
                killed += kill_marked(f"{self.mark}{holder}/")
        return killed

    def release(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> StateDir:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def holder(self) -> int | None:
        """Returns the process id of the current holder, or None."""
        if self._lock is not None:
            return os.getpid()
        try:
            with (self.path / "lock").open(encoding="utf-8") as lock:
                # A shared lock, so that two readers do not mistake each other for the holder.
                if _locked_within(lock, 0.0, fcntl.LOCK_SH):
                    return None
                content = lock.read()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(content)
        except json.JSONDecodeError:  # empty or incomplete: the lock is just being taken or released
            return None
        # While a killed holder's lock is being taken, the file still has the old id, which may be reused by now.
        return int(found["pid"]) if found.get("born") in (None, _born(found["pid"])) else None

    def _described_holder(self) -> str:
        try:
            content = json.loads((self.path / "lock").read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            return "another process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content["since"]))
        return f"process {content['pid']} ({content['command']}, since {since})"

    def port(self, name: str, *, fixed: bool = False, preferred: int | None = None) -> int:
        """Returns the port of this name: a free one at first, and the same at every later start.

        `preferred`: the first choice, unless another process or another name has it. Call it before the listener is
        started. If another process has taken the port, chooses a new one with a warning;
        a `fixed` port, which users may have written down, is never replaced.

        Raises:
            StateDirError: a fixed port is taken, or ports.json is damaged; the message names the process or the file.
        """
        if self._lock is None:
            raise RuntimeError("acquire the state directory (`with`) before choosing ports in it")
        file = self.path / "ports.json"
        ports: dict[str, int] = read_whole(file) if file.exists() else {}
        known = ports.get(name)
        if known is not None and port_is_free(known):
            return known
        if known is not None and fixed:
            raise StateDirError(
                f"port {known} of {name} is taken by {listener_of(known)}: stop it, or remove {name!r} from {file} "
                "to choose another port"
            )
        taken = set(ports.values())
        wanted = known is None and preferred is not None and preferred not in taken and port_is_free(preferred)
        ports[name] = preferred if preferred is not None and wanted else free_port(avoid=taken)
        if known is not None:
            log.warning("port %d of %s is taken by %s: using %d", known, name, listener_of(known), ports[name])
        write_whole(file, ports)
        return ports[name]

    def status(self) -> dict[str, Any] | None:
        """Returns `status.json` plus `running`: True if its supervisor still runs. None if there is no file. Raises
        StateDirError if it is damaged."""
        try:
            status: dict[str, Any] = read_whole(self.path / "status.json")
        except FileNotFoundError:
            return None
        return {**status, "running": self.holder() == status["supervisor"]}


def request_stop(path: Path, timeout: float = 15.0) -> int | None:
    """Asks the holder of a state directory to stop (SIGTERM) and waits until it has released it and ended.

    Returns:
        The id of the stopped process, or None if none ran.

    Raises:
        StateDirError: the process still holds the directory after `timeout` seconds.
    """
    state = StateDir(path)
    pid = state.holder()
    if pid is None:
        return None
    try:
        handle = os.pidfd_open(pid)
        try:
            if state.holder() == pid:  # the id may have been reused before the handle was opened: check again
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                _await_release(state, pid, timeout)
                # The interpreter needs a moment to exit after the release, and the holder may have more to do.
                select.select([handle], [], [], _LAST_MOMENT)
        finally:
            os.close(handle)
    except ProcessLookupError:  # it ended in between
        return pid
    except PermissionError as error:
        raise StateDirError(f"process {pid} holds {state.path} and belongs to another user: {error}") from error
    return pid


def _await_release(state: StateDir, pid: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while state.holder() == pid:
        if time.monotonic() > deadline:
            raise StateDirError(
                f"process {pid} still holds {state.path} {timeout:g} s after it was asked to stop. "
                f"`kill -9 {pid}` ends it and all processes that it supervises."
            )
        time.sleep(0.05)


def write_whole(path: Path, content: Any) -> None:
    """Writes JSON atomically: a reader sees the old or the new file. Raises OSError and leaves no temporary file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_whole(path: Path, remedy: str = _ANEW) -> Any:
    """Reads a JSON object that `write_whole` wrote. Raises FileNotFoundError, and StateDirError with the remedy if the
    file is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise StateDirError(f"{path} is damaged: {error}. {remedy}") from error
    if not isinstance(found, dict):
        raise StateDirError(f"{path} is damaged: it is not a JSON object. {remedy}")
    return found


def _born(pid: int) -> int | None:
    """Returns the start time of a process in ticks since boot, unique together with its id. None if it has ended."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name, in parentheses, may contain anything
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _locked_within(file: IO[str], seconds: float, kind: int = fcntl.LOCK_EX) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.02)
