"""The state directory of one local installation: one holder, remembered ports, files written whole."""

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
from tentalis.local.ports import free_port, listener_of, port_is_free

log = logging.getLogger(__name__)

_LAST_MOMENT = 3.0

FOLDERS = ("kafka", "logs", "checkpoints", "adapters", "reports")


class StateError(RuntimeError):
    """The state directory cannot be used. The message says who has it or what is wrong, and what to do."""


class StateDir:
    """`.tentalis/`: `lock`, `ports.json`, `status.json` and the folders of Kafka's data, logs, checkpoints and so on.

    `with StateDir(path) as state:` holds it; two runs cannot hold it at once. Without that it can be looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[str] | None = None

    @property
    def mark(self) -> str:
        """What the processes that belong to this directory carry in their environment, whoever started them."""
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16] + "/"

    @property
    def own_mark(self) -> str:
        """What those carry that this process starts: another may believe that it holds the directory, if it was removed
        and made again."""
        return f"{self.mark}{os.getpid()}-{_born(os.getpid())}/"

    def lost(self) -> str | None:
        """Why the directory is no longer the one that this process holds, None as long as it is.

        To be asked by the holder. A directory that cannot be looked at for another reason counts as held.
        """
        assert self._lock is not None
        try:
            there, held = (self.path / "lock").stat(), os.fstat(self._lock.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return f"the state directory {self.path} is gone: somebody removed it. Everything that ran in it is stopped"
        except OSError:
            return None
        if os.path.samestat(there, held):
            return None
        return (
            f"the state directory {self.path} is gone: somebody removed it, and another has been made in its place. "
            "Everything that ran in the old one is stopped"
        )

    def folder(self, name: str) -> Path:
        """A folder inside, created if missing."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def acquire(self) -> None:
        """Take the lock for the life of this process, create the folders, and end what a killed earlier run left over.

        Raises:
            StateError: another process holds the directory, or it cannot be written.
        """
        try:
            for name in FOLDERS:
                self.folder(name)
            lock = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise StateError(
                f"cannot use the state directory {self.path}: {error}. Choose another with TENTALIS_HOME."
            ) from error
        if not _locked_within(lock, 0.5):  # `holder()` takes the lock for a moment to see whether it is free
            lock.close()
            raise StateError(
                f"the state directory {self.path} is in use by {self._described_holder()}. "
                "End that with `tentalis down`, or choose another directory with TENTALIS_HOME."
            )
        lock.truncate(0)
        holder = {"pid": os.getpid(), "born": _born(os.getpid()), "command": " ".join(sys.argv), "since": time.time()}
        lock.write(json.dumps(holder))
        lock.flush()
        self._lock = lock
        if not os.environ.get(MARK, "").startswith(self.mark):  # we are no leftover ourselves
            try:
                leftovers = self._kill_leftovers()
            except TimeoutError as error:
                self.release()
                raise StateError(f"an earlier run in {self.path} left processes that do not end: {error}") from error
            if leftovers:
                log.warning("ended %d processes that an earlier run left over: %s", len(leftovers), leftovers)

    def _kill_leftovers(self) -> list[int]:
        """Of holders that are dead. One that lives lost this directory; it ends its processes itself."""
        killed: list[int] = []
        for holder in {mark.removeprefix(self.mark).partition("/")[0] for mark in marks(self.mark)}:
            pid, _, born = holder.partition("-")
            lives = pid.isdecimal() and str(_born(int(pid))) == born
            if not lives or pid == str(os.getpid()):
                killed += kill_marked(f"{self.mark}{holder}/")
        return killed

    def release(self) -> None:
        """Give the lock back."""
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
        """The process id of whoever holds the directory now, or None."""
        if self._lock is not None:
            return os.getpid()
        try:
            with (self.path / "lock").open(encoding="utf-8") as lock:
                # Shared, so that two that only look do not take each other for the holder.
                if _locked_within(lock, 0.0, fcntl.LOCK_SH):
                    return None
                content = lock.read()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(content)
        except json.JSONDecodeError:  # empty, or in part: it is just being taken or given back
            return None
        # Being taken, after a holder that was killed: what is written is still that one, and its id may be another's.
        return int(found["pid"]) if found.get("born") in (None, _born(found["pid"])) else None

    def _described_holder(self) -> str:
        try:
            content = json.loads((self.path / "lock").read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            return "another process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content["since"]))
        return f"process {content['pid']} ({content['command']}, since {since})"

    def port(self, name: str, *, fixed: bool = False) -> int:
        """The port of this name: chosen free once, and the same at every later start.

        To be called before what listens there is started. A port that a foreign process has taken meanwhile is replaced
        by another, with a warning; a `fixed` one, which others may have written down, is not.

        Raises:
            StateError: a fixed port is taken, with who has it.
        """
        if self._lock is None:
            raise RuntimeError("hold the state directory before choosing ports in it")
        file = self.path / "ports.json"
        ports: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known = ports.get(name)
        if known is not None and port_is_free(known):
            return known
        if known is not None and fixed:
            raise StateError(
                f"port {known} of {name} is taken by {listener_of(known)}: end that, or remove {name!r} from {file} "
                "to have another port chosen"
            )
        ports[name] = free_port(avoid=set(ports.values()))
        if known is not None:
            log.warning("port %d of %s is taken by %s: now on %d", known, name, listener_of(known), ports[name])
        write_whole(file, ports)
        return ports[name]

    def status(self) -> dict[str, Any] | None:
        """What the supervisor last wrote to `status.json`, with `running`: whether it is still there. None if never."""
        try:
            status: dict[str, Any] = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return {**status, "running": self.holder() == status["supervisor"]}


def request_stop(path: Path, timeout: float = 15.0) -> int | None:
    """Ask the holder of a state directory to stop (SIGTERM) and wait until it has, and its process with it.

    Returns:
        The process id that stopped, or None if nothing ran.

    Raises:
        StateError: it still holds the directory after `timeout` seconds.
    """
    state = StateDir(path)
    pid = state.holder()
    if pid is None:
        return None
    try:
        handle = os.pidfd_open(pid)
        try:
            if state.holder() == pid:  # the handle is for whoever has the id now: look again
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                _await_release(state, pid, timeout)
                # An interpreter takes a moment to end after its last line; a holder may also have more to do.
                select.select([handle], [], [], _LAST_MOMENT)
        finally:
            os.close(handle)
    except ProcessLookupError:  # it ended between the two lines
        return pid
    except PermissionError as error:
        raise StateError(f"process {pid} holds {state.path} and belongs to somebody else: {error}") from error
    return pid


def _await_release(state: StateDir, pid: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while state.holder() == pid:
        if time.monotonic() > deadline:
            raise StateError(
                f"process {pid} still holds {state.path} {timeout:g} s after it was asked to stop. "
                f"`kill -9 {pid}` ends it and everything that it supervises."
            )
        time.sleep(0.05)


def write_whole(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part. Raises OSError; nothing is left."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _born(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; with its id, nobody else's. None: it has ended."""
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
