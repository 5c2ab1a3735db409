"""The control channel of a running stack: requests to its supervisor through a Unix socket in the state directory.

A socket, and not files that the supervisor would read: it answers, a request cannot outlive the supervisor, and it
works on a full disk. Its mode is 0600 and the kernel names the user of each connection: only the owner is answered. A
request and its answer are one line of JSON each.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SOCKET = "control.sock"
_ANSWER_S = 20.0
_LONGEST = 2**22


class ControlError(RuntimeError):
    """The supervisor cannot be asked, or refuses. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request of an operator.

    Attributes:
        action: `start`, `stop`, `restart`, `log-level`, or `status`, which changes nothing.
        names: the processes.
        level: the log level, for `log-level`.
    """

    action: str
    names: tuple[str, ...]
    level: str = ""


Statuses = dict[str, dict[str, Any]]
"""The status of each named process, as Supervisor.status() has it."""


class ControlServer:
    """Answers requests on a thread.

    `handle` carries one out and returns the status of its processes; it raises ControlError to refuse.
    """

    def __init__(self, folder: Path, handle: Callable[[ControlRequest], Statuses]) -> None:
        self._handle = handle
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            (folder / SOCKET).unlink(missing_ok=True)
            self._socket.bind(address)
            (folder / SOCKET).chmod(0o600)  # before it listens, so nobody else can have connected
            self._own = (folder / SOCKET).stat()
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the socket."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            if os.path.samestat((self._folder / SOCKET).stat(), self._own):
                (self._folder / SOCKET).unlink()
        except FileNotFoundError:  # the state directory was removed; another one in its place has its own socket
            log.debug("%s is gone", self._folder / SOCKET)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    self._answer(connection)
                except OSError as error:  # the client has gone
                    log.debug("a request ended early: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_ANSWER_S)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        line = _read_line(connection)  # also of a stranger: closed unread, the connection would break before the answer
        if user not in (os.getuid(), 0):
            connection.sendall(_line({"error": "the stack belongs to another user"}))
            return
        try:
            request = _request(line)
            if _has_left(connection):  # it took too long, and the operator was told that nobody answers
                return
            processes = self._handle(request)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # refused, or not understood
            connection.sendall(_line({"error": str(error)}))
            return
        connection.sendall(_line({"processes": processes}))


def ask(folder: Path, request: ControlRequest) -> Statuses:
    """Sends a request to the supervisor of a state directory; returns the status of its processes once it has begun.

    Raises:
        ControlError: no supervisor answers, or it refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            with _address(folder) as address:
                connection.connect(address)
            connection.sendall(_line(asdict(request)))
            answer = json.loads(_read_line(connection))
        except PermissionError as error:
            raise ControlError(f"the stack in {folder} belongs to another user: {error}") from error
        except (OSError, json.JSONDecodeError) as error:
            raise ControlError(
                f"the supervisor of {folder} does not answer ({error}). `tentalis down`, then `tentalis up` starts it "
                "again"
            ) from error
    if "error" in answer:
        raise ControlError(answer["error"])
    found: Statuses = answer["processes"]
    return found


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yields a short path of the socket: the kernel takes 107 bytes at most, and a state directory may lie deeper."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


def _request(line: bytes) -> ControlRequest:
    found = json.loads(line)
    return ControlRequest(str(found["action"]), tuple(map(str, found["names"])), str(found.get("level", "")))


def _has_left(connection: socket.socket) -> bool:
    """Returns True if the client has closed the connection: it sends nothing after its line."""
    return bool(select.select([connection], [], [], 0)[0])


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    """Returns what comes up to the end of a line. Raises ConnectionError if the line does not end."""
    found = bytearray()
    while not found.endswith(b"\n"):
        chunk = connection.recv(4096)
        if not chunk or len(found) > _LONGEST:
            raise ConnectionError("the connection ended early")
        found += chunk
    return bytes(found)
