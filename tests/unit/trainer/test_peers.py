"""A rank that is gone ends the others within a stated time and is named. Real processes; rank 0 serves their store."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tentalis.local.ports import free_port
from tentalis.service.exit_codes import ExitCode
from tests.support import forked

ALL_END = ": all ranks end, and must be started together"
PATIENCE = 120  # seconds, on a machine that does other things too
HERE = "this rank meets its fate"


def rank(argument: str) -> int:
    """Runs a rank that ends as a trainer's does. `argument`: a place, the number of the rank that meets a fate there,
    and the fate; the other rank waits there."""
    from trainer.distributed import members, peers, ranks

    members.PATIENCE_SECONDS, peers.BROKEN_SECONDS, peers.GRACE_SECONDS = 5.0, 3.0, 1.0
    place, victim, fate = argument.split()
    if place == "come":
        ranks.TIMEOUT = timedelta(seconds=3)
    try:
        group = ranks.join_ranks()
        with group.share_end(lambda: None):
            channel = ranks.RankChannel(group)
            if group.rank == int(victim):
                meet_fate(fate)
            elif place == "command":
                channel.wait_for_command(lambda: None)
            elif place == "model":
                group.meet("model", "loaded the model", lambda: None, 4.0)
            elif place == "gradient":
                group.gather("x")
    except ranks.RankLost as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.ERROR
    return ExitCode.OK


def meet_fate(fate: str) -> None:
    print(HERE, file=sys.stderr, flush=True)
    if fate in signal.Signals.__members__:
        os.kill(os.getpid(), signal.Signals[fate])
    elif fate == "stuck":
        time.sleep(PATIENCE)
    raise ValueError("no such adapter")


@contextmanager
def started(folder: Path, argument: str, *numbers: int) -> Iterator[dict[int, tuple[ForkServerProcess, Path]]]:
    """The processes of these ranks of two, and their logs."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")} | address
    ranks = {}
    try:
        for number in numbers:
            log = folder / f"{number}.log"
            process = forked.start(rank, argument, environment | {"RANK": str(number)}, log, log)
            ranks[number] = process, log
        yield ranks
    finally:
        for process, _ in ranks.values():
            forked.end(process)


def error_of(ended: tuple[ForkServerProcess, Path]) -> str:
    """Waits for the end of a rank; returns its error."""
    process, log = ended
    process.join(PATIENCE)
    text = log.read_text()
    assert process.exitcode == ExitCode.ERROR and HERE not in text, text
    (error,) = (line for line in text.splitlines() if line.startswith("error: "))
    return error.removeprefix("error: ")


@pytest.mark.parametrize(
    ("place", "victim", "fate", "said"),
    [
        ("command", 1, "SIGKILL", "rank 1 has given no sign of life for 5 s"),
        ("command", 1, "fails", "rank 1 ended: ValueError: no such adapter"),
        ("command", 0, "fails", "rank 0 ended: ValueError: no such adapter"),
        ("command", 0, "SIGKILL", "rank 0 does not answer at 127.0.0.1:"),
        ("gradient", 1, "SIGKILL", "rank 1 has broken the connection and given no sign of life for 3 s"),
        ("gradient", 1, "SIGSTOP", "rank 1 has given no sign of life for 5 s"),
        ("model", 1, "stuck", "rank 1 has not loaded the model within 4 s"),
    ],
)
def test_a_rank_that_is_gone_is_named_and_ends_the_other(
    tmp_path: Path, place: str, victim: int, fate: str, said: str
) -> None:
    with started(tmp_path, f"{place} {victim} {fate}", 0, 1) as ranks:
        error = error_of(ranks[1 - victim])
        assert error.startswith(said) and error.endswith(ALL_END), error
        assert HERE in ranks[victim][1].read_text()


@pytest.mark.parametrize(
    ("comes", "said"),
    [
        (0, f"rank 1 has not come within 3 s{ALL_END}"),
        (1, "rank 0 is missing: rank 1 finds no store at MASTER_ADDR=127.0.0.1 MASTER_PORT="),
    ],
)
def test_a_rank_that_never_comes_is_named(tmp_path: Path, comes: int, said: str) -> None:
    with started(tmp_path, "come -1 -", comes) as ranks:
        assert error_of(ranks[comes]).startswith(said)
