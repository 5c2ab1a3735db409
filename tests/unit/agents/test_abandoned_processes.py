"""Processes that a killed holder of a wall left: they are found and ended, and those of the living are left alone."""

import ctypes
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tentalis.agents.sandbox import kill_abandoned
from tentalis.agents.sandbox.abandoned import LEAST, mark
from tests.support import ROOT
from tests.support.walls import available_wall

HOLDER = """
import sys, threading, time
from pathlib import Path
from tentalis.agents.sandbox import Limits, choose_wall
from tentalis.agents.sandbox.no_wall import NoWall

wall = NoWall() if sys.argv[1] == "none" else choose_wall()
if sys.argv[1] == "command":
    folder, told = Path(sys.argv[2]), Path(sys.argv[2], "told")
    command = ["/bin/sh", "-c", "exec >told; " + sys.argv[3]]
    threading.Thread(target=wall.run, args=(command, folder, Limits()), daemon=True).start()
    while not told.exists() or not told.read_text().endswith("\\n"):
        time.sleep(0.05)
    print(told.read_text(), flush=True)
    sys.stdin.read()
running = wall.start(["/bin/sh", "-c", sys.argv[3]], Path(sys.argv[2]), Limits())
print(running.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""
LOWERED = f"""{sys.executable} -IS -c '
import ctypes
libc = ctypes.CDLL(None)
lowered = (ctypes.c_ulong * 2)(5, 5)
libc.setrlimit(10, lowered); libc.syscall(160, 10, lowered); libc.prlimit(0, 10, lowered, None)
' ; ulimit -w 5 2>/dev/null || ulimit -x 5 2>/dev/null"""
DETACHED = "setsid sleep 86398 >/dev/null 2>&1 </dev/null & echo $!; wait"


def wait_until_it_sleeps(pid: int) -> None:
    """Waits for the program `sleep`: until a process has become it, it needs the holder, which supervises the wall."""
    end = time.monotonic() + 60.0
    while psutil.Process(pid).cmdline()[:1] != ["sleep"]:
        assert time.monotonic() < end
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_LOCKS"), reason="only Linux has the limit that marks a process")
@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("wall", DETACHED),
        ("command", DETACHED),
        ("command", f"{LOWERED}; {DETACHED}"),
        ("none", DETACHED),
    ],
    ids=["of a server", "of a command", "of a command that tried to lower its mark", "without a wall"],
)
def test_a_process_of_a_killed_holder_is_ended_by_the_next(tmp_path: Path, kind: str, command: str) -> None:
    if kind != "none":
        available_wall()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind, str(tmp_path), command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        wait_until_it_sleeps(pid)
        assert pid not in kill_abandoned() and lives(pid), "the holder lives"
        holder.send_signal(signal.SIGKILL)
    assert lives(pid), "it outlives its holder: else this test shows nothing"
    assert pid in kill_abandoned() and not lives(pid)


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_LOCKS"), reason="only Linux has the limit that marks a process")
def test_other_children_of_a_holder_are_no_commands() -> None:
    code = "import psutil, sys; print(*psutil.Process().rlimit(psutil.RLIMIT_LOCKS), flush=True); sys.stdin.read()"
    assert mark() == mark() is not None
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline().split() == [str(mark()).encode(), b"-1"]
        assert child.pid not in kill_abandoned() and lives(child.pid)
        child.stdin.close()


AT_ONCE = """
import psutil, secrets, threading, time
from tentalis.agents.sandbox.abandoned import mark

randbits = secrets.randbits
secrets.randbits = lambda bits: (time.sleep(0.2), randbits(bits))[1]  # as on a busy machine
at_once, marks = threading.Barrier(8), []
def first_command():
    at_once.wait()
    marks.append(mark())
threads = [threading.Thread(target=first_command) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
print(*{*marks, psutil.Process().rlimit(psutil.RLIMIT_LOCKS)[0]})
"""


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_LOCKS"), reason="only Linux has the limit that marks a process")
def test_commands_that_begin_at_once_have_the_mark_of_their_holder() -> None:
    found = subprocess.run([sys.executable, "-c", AT_ONCE], stdout=subprocess.PIPE, cwd=ROOT, text=True, check=True)
    assert len(found.stdout.split()) == 1, "one mark, and it is the limit of the process"


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]


def confined(limit: int) -> None:
    """Makes this process one that a service manager confined: no new privileges, a filter of system calls, a limit of
    file locks."""
    allow_all = ctypes.create_string_buffer(
        (0x06).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
    )
    libc = ctypes.CDLL(None)
    psutil.Process().rlimit(psutil.RLIMIT_LOCKS, (limit, limit))
    libc.prctl(38, 1, 0, 0, 0)
    libc.prctl(22, 2, ctypes.byref(_Filter(1, ctypes.addressof(allow_all))))


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_LOCKS"), reason="only Linux has the limit that marks a process")
@pytest.mark.parametrize("limit", [5, LEAST, LEAST | 1 << 30, (1 << 62) - 1, (1 << 63) - 1])
def test_a_process_with_a_limit_that_somebody_else_set_is_left_alone(limit: int) -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, preexec_fn=lambda: confined(limit)) as other:
        assert other.stdin is not None
        assert "Seccomp:\t2" in Path(f"/proc/{other.pid}/status").read_text()
        assert other.pid not in kill_abandoned() and lives(other.pid)
        other.stdin.close()
