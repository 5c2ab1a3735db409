"""Processes that a killed holder of a wall left: they are found and ended, and those of the living are left alone."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tentalis.agents.sandbox import WallMissing, choose_wall, kill_abandoned
from tentalis.agents.sandbox.abandoned import mark
from tests.support import ROOT

HOLDER = """
import sys
from pathlib import Path
from tentalis.agents.sandbox import Limits, choose_wall
from tentalis.agents.sandbox.no_wall import NoWall

wall = NoWall() if sys.argv[1] == "none" else choose_wall()
running = wall.start(["/bin/sh", "-c", sys.argv[3]], Path(sys.argv[2]), Limits())
print(running.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""
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
        ("wall", f"ulimit -w 5 2>/dev/null || ulimit -x 5; {DETACHED}"),
        ("none", DETACHED),
    ],
    ids=["detached", "that lowered its mark", "without a wall"],
)
def test_a_process_of_a_killed_holder_is_ended_by_the_next(tmp_path: Path, kind: str, command: str) -> None:
    if kind == "wall":
        try:
            choose_wall()
        except WallMissing as error:
            pytest.skip(str(error))
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
        if "ulimit" not in command:
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
