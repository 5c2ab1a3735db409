"""A rank that is gone ends the others within a stated time and is named. Real processes; rank 0 serves their store."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tentalis.local.ports import free_port
from tentalis.service.exit_codes import ExitCode

# Two ranks that end as a trainer's do. One of them meets its fate at a place; the other one waits there.
RANK = """
import os, signal, sys, time
from datetime import timedelta
from trainer.distributed import members, peers, ranks
members.PATIENCE_SECONDS, peers.BROKEN_SECONDS, peers.GRACE_SECONDS, ranks.REPORT_SECONDS = 3.0, 2.0, 1.0, 1.0
place, victim, fate = sys.argv[1:]
if place == "come": ranks.TIMEOUT = timedelta(seconds=3)

def meet_fate():
    print("here", flush=True)
    if fate == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if fate == "frozen": os.kill(os.getpid(), signal.SIGSTOP)
    if fate == "stuck": time.sleep(120)
    raise ValueError("no such adapter")

try:
    group = ranks.join_ranks()
    with group.share_end(lambda: None):
        channel = ranks.RankChannel(group)
        if group.rank == int(victim): meet_fate()
        if place == "command": channel.wait_for_command(lambda: None)
        if place == "model": group.meet("model", "loaded the model", lambda: None, 4.0)
        if place == "gradient": group.gather("x")
except ranks.RankLost as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
"""
ALL_END = ": all ranks end, and must be started together"


@contextmanager
def started(
    place: str, victim: int, fate: str, ranks: tuple[int, ...] = (0, 1)
) -> Iterator[dict[int, "subprocess.Popen[str]"]]:
    """The ranks' processes, by number."""
    port, processes = free_port(), {}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "TORCHELASTIC_"))}
    for rank in ranks:
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes[rank] = subprocess.Popen(
            [sys.executable, "-c", RANK, place, str(victim), fate],
            env=others | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("place", "victim", "fate", "said"),
    [
        ("command", 1, "killed", "rank 1 has given no sign of life for 3 s"),
        ("command", 1, "fails", "rank 1 ended: ValueError: no such adapter"),
        ("command", 0, "killed", "rank 0 does not answer at 127.0.0.1:"),
        ("gradient", 1, "killed", "rank 1 has broken the connection and given no sign of life for 2 s"),
        ("gradient", 1, "frozen", "rank 1 has given no sign of life for 3 s"),
        ("model", 1, "stuck", "rank 1 has not loaded the model within 4 s"),
    ],
)
def test_a_rank_that_is_gone_is_named_and_ends_the_other(place: str, victim: int, fate: str, said: str) -> None:
    with started(place, victim, fate) as ranks:
        out, text = ranks[1 - victim].communicate(timeout=120)
        (error,) = (line for line in text.splitlines() if line.startswith("error: "))
        assert error.startswith(f"error: {said}") and error.endswith(ALL_END), text
        assert ranks[1 - victim].returncode == ExitCode.ERROR and out == ""


@pytest.mark.parametrize(
    ("comes", "said"),
    [
        (0, "rank 1 has not come within 3 s"),
        (1, "rank 0 is missing: rank 1 finds no store at MASTER_ADDR=127.0.0.1 MASTER_PORT="),
    ],
)
def test_a_rank_that_never_comes_is_named(comes: int, said: str) -> None:
    with started("come", -1, "", (comes,)) as ranks:
        text = ranks[comes].communicate(timeout=120)[1]
        assert ranks[comes].returncode == ExitCode.ERROR
        assert f"error: {said}" in text
