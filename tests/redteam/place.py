"""The place of an attack: the attacker's folder, and beside it everything that it must not reach."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tentalis.local.ports import free_port

SECRET = "the-secret-of-the-worker"
TEST = "assert False\n"


@dataclass
class Place:
    """A place with its victim: another process of this user, which holds the secret in its variables and an open file.

    `listened`: set when somebody outside could connect to the port that the attacker may listen on.
    """

    folder: Path
    victim: subprocess.Popen[bytes]
    port: int
    attackers_port: int
    changed_ns: int
    datagrams: socket.socket
    listened: threading.Event = field(default_factory=threading.Event)

    @property
    def work(self) -> Path:
        """The attacker's folder."""
        return self.folder / "work"

    def filled(self, code: str) -> str:
        """Returns the code of an attack with the names of this place."""
        names = {
            "PLACE": str(self.folder),
            "VICTIM": str(self.victim.pid),
            "ATTACKERS_PORT": str(self.attackers_port),
            "PORT": str(self.port),
            "HOME": str(Path.home()),
            "ROOT_ENTRIES": repr(sorted(each.name for each in Path("/").iterdir())),
        }
        for name, value in names.items():
            code = code.replace(f"@{name}@", value)
        return code

    def received(self) -> bool:
        """Returns True if a datagram came to the port."""
        with suppress(BlockingIOError):
            return bool(self.datagrams.recv(64))
        return False

    def damage(self) -> list[str]:
        """Returns what is not as before: files beside the attacker's folder, the victim, processes that were left."""
        return [*self._changed_files(), *self._changed_victim(), *self._left_processes()]

    def _changed_files(self) -> Iterator[str]:
        secret, test = self.folder / "secret", self.folder / "tests/test_answer.py"
        if sorted(each.name for each in self.folder.iterdir()) != ["main.py", "secret", "socket", "tests", "work"]:
            yield "files beside the folder"
        elif secret.read_text() != SECRET or secret.stat().st_ctime_ns != self.changed_ns:
            yield "the secret, its rights, owner, times or attributes were changed"
        elif not test.is_file() or test.read_text() != TEST:
            yield "the tests were changed"

    def _changed_victim(self) -> Iterator[str]:
        if self.victim.poll() is not None:
            yield "the victim was killed"
            return
        process, this = psutil.Process(self.victim.pid), psutil.Process()
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            yield "the victim was stopped"
        if process.nice() != this.nice():
            yield f"the victim has the priority {process.nice()}, not {this.nice()}"
        if (core := process.rlimit(psutil.RLIMIT_CORE)) != (own := this.rlimit(psutil.RLIMIT_CORE)):
            yield f"the victim has the limits {core} of core files, not {own}"

    def _left_processes(self) -> Iterator[str]:
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if each.pid != self.victim.pid and str(self.folder) in " ".join(each.cmdline()):
                    yield f"process {each.pid} was left"


@contextmanager
def made_place(folder: Path) -> Iterator[Place]:
    """Makes a place in an empty folder, with servers on loopback, on a path and on an abstract name."""
    for name in ("work", "tests"):
        (folder / name).mkdir()
    (folder / "tests/test_answer.py").write_text(TEST)
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    with (
        secret.open() as held,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(
            ["/bin/sleep", "600"],
            cwd=folder,
            env={"TENTALIS_TEST_SECRET": SECRET},
            pass_fds=(held.fileno(),),
        ) as victim,
    ):
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        udp.setblocking(False)
        by_path.bind(str(folder / "socket"))
        abstract.bind(f"\0tentalis-test-{victim.pid}")
        for each in (by_path, abstract):
            each.listen()
        os.set_inheritable(held.fileno(), True)
        place = Place(folder, victim, port, free_port(), secret.stat().st_ctime_ns, udp)
        ended = threading.Event()
        visitor = threading.Thread(target=_visit, args=(place, ended), daemon=True)
        visitor.start()
        try:
            yield place
        finally:
            ended.set()
            visitor.join()
            victim.kill()


def _visit(place: Place, ended: threading.Event) -> None:
    """Tries to connect to the attacker until the end."""
    while not ended.wait(0.1):
        with suppress(OSError), socket.create_connection(("127.0.0.1", place.attackers_port), 0.2):
            place.listened.set()
            return
