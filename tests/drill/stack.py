"""The whole local stack under its supervisor, on a small disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from schemas import topics
from tentalis.service.settings import Settings
from tests.drill.bench import Workload, has_read, until
from tests.drill.fault import Sight, fault
from tests.drill.lost_topics import CHANGELOG
from tests.drill.shell import Shell
from tests.support.inference_lab import make_model
from tests.support.kafka_fixture import eventually
from tests.support.recreated import delete, recreate

TROUBLE = "processes-in-trouble.md"
PROCESSES = "processes.md"
LAG = "lag-grows.md"
LEARNS = "nothing-is-learned.md"
LOST = "lost-topics.md"
EXIT_5 = "exit-5.md"
FORGET = "forget.md"
DISK_MIB = 900


class Stack:
    """`tentalis up` with a tiny model. Its home is a file system of its own, which a fault fills."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk = folder, folder / "disk"
        self.home = self.disk / "home"
        self.shell = Shell(folder, {"TENTALIS_HOME": str(self.home), "MODEL": str(folder / "tiny")})

    def open(self) -> None:
        make_model(self.folder / "tiny")
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        if mounted.returncode:
            raise RuntimeError(
                f"the full disk needs a file system of its own, and so the right to mount: {mounted.stderr}"
            )
        up = self.shell.run("tentalis up --detach --gateway --policy-model $MODEL", 900)
        assert up.code == 0, up.says
        self.shell.env["GATEWAY_PORT"] = str(self.gateway_port)
        self.settings = Settings(bootstrap=f"127.0.0.1:{self._ports()['broker']}", home=self.home)
        self.work = Workload(self.settings, policy="drill")

    def _ports(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.home / "ports.json").read_text())
        return found

    @property
    def gateway_port(self) -> int:
        return self._ports()["gateway"]

    def fill(self, spare: int) -> None:
        """Fills the disk, all but `spare` bytes of it, with the file that BALLAST names."""
        ballast = self.disk / "ballast"
        self.shell.env["BALLAST"] = str(ballast)
        free = os.statvfs(self.disk)
        with ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), max(1, free.f_bavail * free.f_frsize - spare))

    def close(self) -> None:
        self.shell.run("tentalis down", 60)
        self.shell.close()
        subprocess.run(["umount", "--lazy", str(self.disk)], check=False)

    def lost(self) -> list[str]:
        """The problems that the verifier finds in all that was asked here."""
        return self.work.problems()

    def status(self) -> dict[str, dict[str, Any]]:
        """The processes as `tentalis status` shows them."""
        return dict(json.loads((self.home / "status.json").read_text())["processes"])

    def pid(self, name: str) -> int:
        return int(self.status()[name]["pid"])

    def sight(self, name: str, state: str, seconds: float = 120.0) -> Sight:
        """Waits until `tentalis status` shows a process in a state, and ends with 1; what it shows at last."""
        until(lambda: self.status()[name]["state"] == state, seconds, 0.2)
        shown = self.shell.run("tentalis status -o json")
        process = json.loads(shown.says[shown.says.index("{") :])["processes"][name]
        named = shown.code == 1
        return Sight(state=process["state"], says=process["message"] if named else f"`status` exits with {shown.code}")

    def ready(self) -> None:
        """Waits until every process works."""

        def works() -> bool:
            return all(one["state"] in ("ready", "done") for one in self.status().values())

        eventually(works, 180, 0.5, lambda: str({name: one["state"] for name, one in self.status().items()}))

    def works(self, run: str) -> None:
        """Every process works, and a task gets its outcome."""
        self.ready()
        self.work.answer(self.work.ask(run, 2))
        self.work.settled(run)


@fault("stack", TROUBLE, state="unresponsive", says="stopped by a signal (SIGSTOP)")
def a_frozen_process(stack: Stack) -> Iterator[Sight]:
    os.kill(stack.pid("join"), signal.SIGSTOP)
    yield stack.sight("join", "unresponsive")
    stack.works("frozen-process")


@fault("stack", TROUBLE, state="unresponsive", says="stopped by a signal (SIGSTOP)")
def a_frozen_broker(stack: Stack) -> Iterator[Sight]:
    stack.shell.env["PID"] = str(stack.pid("broker"))
    os.kill(stack.pid("broker"), signal.SIGSTOP)
    yield stack.sight("broker", "unresponsive")
    stack.works("frozen-broker")


@fault("stack", TROUBLE, code=0, says="ended by SIGKILL")
def a_killed_process(stack: Stack) -> Iterator[Sight]:
    asked = stack.work.ask("killed-process", 4)
    before = stack.status()["join"]["restarts"]
    os.kill(stack.pid("join"), signal.SIGKILL)
    eventually(lambda: stack.status()["join"]["restarts"] > before, 30)
    yield stack.shell.run("tentalis events join")
    stack.work.answer(asked)
    stack.works("killed-process")


@fault("stack", PROCESSES, code=0, says="ended by SIGSEGV")
def a_native_crash(stack: Stack) -> Iterator[Sight]:
    """A process that a library ends, and that an operator then looks into."""
    before = stack.status()["aggregation"]["restarts"]
    os.kill(stack.pid("aggregation"), signal.SIGSEGV)
    eventually(lambda: stack.status()["aggregation"]["restarts"] > before, 60)
    yield stack.shell.run("tentalis events aggregation")
    stack.works("native-crash")


@fault("stack", TROUBLE, state="crash-looping", says="is taken by")
def a_crash_loop(stack: Stack) -> Iterator[Sight]:
    yield from _crash_loop(stack, "scoring")


@fault("stack", TROUBLE, state="crash-looping", says="is taken by")
def a_trainer_in_a_crash_loop(stack: Stack) -> Iterator[Sight]:
    yield from _crash_loop(stack, "trainer")


def _crash_loop(stack: Stack, name: str) -> Iterator[Sight]:
    """A process cannot start, and the others go on."""
    port = stack._ports()[name]
    assert stack.shell.run(f"tentalis stop {name}").code == 0
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    holder = stack.shell.begin(f'python -c "{code}"')
    stack.shell.env["PID"] = str(holder.pid)
    eventually(lambda: _taken(port), 20)
    stack.shell.run(f"tentalis start {name} --timeout 5")
    sight = stack.sight(name, "crash-looping")
    others = {other: one["state"] for other, one in stack.status().items() if other != name}
    assert set(others.values()) <= {"ready", "waiting", "done"}, others
    yield sight
    stack.works(f"{name}-in-a-crash-loop")


def _taken(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@fault("stack", EXIT_5, state="halted", says="tentalis groups skip tentalis-join")
def a_halted_process(stack: Stack) -> Iterator[Sight]:
    asked = stack.work.ask("halted-process", 4)
    stack.work.garbage(topics.HALVES, 150)
    yield stack.sight("join", "halted")
    stack.work.answer(asked)
    stack.works("halted-process")


@fault("stack", LOST, state="failed", says="was deleted and created again")
def a_failed_process(stack: Stack) -> Iterator[Sight]:
    asked = stack.work.ask("failed-process", 4)
    stack.works("before-failed-process")
    stack.shell.run("tentalis stop join")
    recreate(stack.settings, CHANGELOG)
    stack.shell.run("tentalis start join --timeout 5")
    yield stack.sight("join", "failed")
    stack.work.answer(asked)
    stack.works("failed-process")


@fault("stack", LOST, code=7, says=f"join: {CHANGELOG} is gone")
def an_up_after_a_lost_topic(stack: Stack) -> Iterator[Sight]:
    """The stack is stopped, and a topic is deleted: `up` starts nothing until the loss is accepted."""
    stack.work.ask("up-after-loss", 4)
    yield from _up_after(stack, "up-after-loss", ["join"], lambda: delete(stack.settings, CHANGELOG))


@fault("stack", LOST, code=7, says=f"join: {topics.HALVES} was deleted and created again")
def an_up_after_a_recreated_input(stack: Stack) -> Iterator[Sight]:
    stack.work.ask("up-after-input", 4)
    yield from _up_after(stack, "up-after-input", ["join", "scoring"], lambda: recreate(stack.settings, topics.HALVES))


@fault("stack", LOST, code=7, says=f"{topics.ROLLOUTS} was deleted and created again")
def an_up_after_recreated_rollouts(stack: Stack) -> Iterator[Sight]:
    stack.works("up-after-rollouts")
    yield from _up_after(stack, "up-after-rollouts", ["trainer"], lambda: recreate(stack.settings, topics.ROLLOUTS))


def _up_after(stack: Stack, run: str, stopped: list[str], lose: Callable[[], None]) -> Iterator[Sight]:
    for app in ("scoring", "join"):
        eventually(lambda app=app: has_read(stack.settings, app), 60, 0.5, f"{app} has lag")
    stack.shell.run(f"tentalis stop {' '.join(stopped)}")
    lose()
    assert stack.shell.run("tentalis down", 120).code == 0
    stack.shell.env["RUN"] = run
    yield stack.shell.run("tentalis up --detach --gateway --policy-model $MODEL", 900)
    stack.works(f"after-{run}")


@fault("stack", TROUBLE, code=1, says="a stack already runs in")
def a_second_up(stack: Stack) -> Iterator[Sight]:
    yield stack.shell.run("tentalis up")
    stack.ready()


@fault("stack", LAG, code=0, says="join stopped")
def a_stopped_application(stack: Stack) -> Iterator[Sight]:
    assert stack.shell.run("tentalis stop join").code == 0
    asked = stack.work.ask("stopped-application", 4)
    stack.work.answer(asked)
    yield stack.shell.run("tentalis status; tentalis groups lag")
    stack.works("stopped-application")


@fault("stack", FORGET, code=1, says="tentalis-join has not applied the request")
def an_unfinished_erasure(stack: Stack) -> Iterator[Sight]:
    """A person is to be erased while an application does not run."""
    stack.work.answer(stack.work.ask("unfinished-erasure", 4, user_id="ann"))
    stack.work.settled("unfinished-erasure")
    assert stack.shell.run("tentalis stop join").code == 0
    yield stack.shell.run("tentalis forget --user ann --yes --wait 5")
    stack.works("after-erasure")


@fault("stack", TROUBLE, code=1, says="no space left on")
def a_full_disk(stack: Stack) -> Iterator[Sight]:
    asked = stack.work.ask("full-disk", 4)
    stack.fill(2**20)
    yield stack.shell.run("tentalis status")
    stack.work.answer(asked)
    stack.works("full-disk")


@fault("stack", TROUBLE, code=1, says="no stack runs in")
def a_dead_supervisor(stack: Stack) -> Iterator[Sight]:
    asked = stack.work.ask("dead-supervisor", 4)
    supervisor = int(json.loads((stack.home / "status.json").read_text())["supervisor"])
    os.kill(supervisor, signal.SIGKILL)
    assert until(lambda: not _lives(supervisor), 20)
    yield stack.shell.run("tentalis status")
    stack.work.answer(asked)
    stack.works("dead-supervisor")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@fault("stack", LEARNS, code=0, says="no trainer of assistant runs")
def nobody_trains(stack: Stack) -> Iterator[Sight]:
    assert stack.shell.run("tentalis stop trainer").code == 0

    def named() -> bool:
        return "no trainer" in stack.shell.run("tentalis groups lag").says

    until(named, 60, 1.0)  # its session in the group ends
    yield stack.shell.run("tentalis groups lag")
    stack.works("nobody-trains")
