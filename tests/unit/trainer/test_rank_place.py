"""Ranks that a scheduler or torchrun numbers: what they may be given, and the store on which they meet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tentalis.service.variable import BadVariable
from tests.support.trainer_lab import config
from trainer.distributed.nodes import NodePlace
from trainer.distributed.rank_place import RankPlace, rank_place
from trainer.run.launch import main

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29400"}
NAMES = (*WHOLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")

# Two ranks of a group, which end as a trainer's do. Rank 0 is the last to open the store and the first to be done.
RANKS = """
import os, sys, time
from trainer.distributed.ranks import RankChannel, join_ranks
rank = int(os.environ["RANK"])
if rank == 0: time.sleep(1)
group = join_ranks()
channel = RankChannel(group)
if rank == 0: channel.send_command({"sum": group.gather(rank)})
else: group.gather(rank); time.sleep(1)
print(channel.wait_for_command(lambda: None), flush=True)
group.leave()
"""
# Rank 0 waits for a command, as for Kafka. Rank 1 dies, and is started again alone.
ALONE_AGAIN = """
import os
from trainer.distributed.peers import RankLost
from trainer.distributed.ranks import RankChannel, join_ranks
try:
    channel = RankChannel(join_ranks())
    if os.environ["RANK"] == "1": os._exit(9)
    channel.wait_for_command(lambda: None)
except RankLost as error:
    print(error, flush=True)
    raise SystemExit(1)
"""


def rank(code: str, number: int, port: int) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    own = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment | own, stdout=subprocess.PIPE, text=True)


def test_places() -> None:
    assert rank_place({"MASTER_ADDR": "first", "RANK": ""}) == RankPlace(0, 1, given=False)
    assert rank_place({"WORLD_SIZE": "1"}) == RankPlace(0, 1, given=True)
    assert rank_place(WHOLE) == RankPlace(1, 2, "first", 29400, given=True)
    several = rank_place(WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert several == RankPlace(1, 2, "first", 29400, given=True, local_rank=1, local_size=2)
    assert rank_place(WHOLE | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_served


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": ""}, "RANK=1 is set, but WORLD_SIZE is not: set WORLD_SIZE to the number of ranks"),
        ({"RANK": ""}, "WORLD_SIZE=2 is set, but RANK is not: give each process its number in RANK, from 0 to 1"),
        ({"RANK": "2"}, "RANK=2: with WORLD_SIZE=2, give 0 to 1"),
        ({"RANK": "-1"}, "RANK=-1: give a whole number"),
        ({"RANK": "first"}, "RANK=first: give a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: give a whole number, at least 1"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=2 is set, but MASTER_ADDR is not: set it to the address of rank 0"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=2 is set, but MASTER_PORT is not: set it to a free port of rank 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: give a whole number from 1 to 65535"),
        ({"LOCAL_RANK": "gpu"}, "LOCAL_RANK=gpu: give a whole number"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1: with LOCAL_WORLD_SIZE=1, give 0 to 0"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set, but LOCAL_RANK is not: give each process on this"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but LOCAL_WORLD_SIZE is not: set it to the number of"),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "run"},
            "over several machines it starts the ranks of one again without the others. Run torchrun on one machine",
        ),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: it counts the ranks on this machine, and WORLD_SIZE=2"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(BadVariable) as caught:
        rank_place(WHOLE | change)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"RANK": "0"}, "error: RANK=0 is set, but WORLD_SIZE is not"), (WHOLE, "error: ")],
    ids=["variables", "no file"],
)
def test_a_rank_is_refused_before_anything_starts(tmp_path: Path, given: dict[str, str], said: str) -> None:
    command = [sys.executable, "-m", "trainer", "train", "--config", str(tmp_path / "none.yaml")]
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(command, env=environment | given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(said) and "Traceback" not in done.stderr


@pytest.mark.parametrize(("ranks", "place"), [(2, None), (1, NodePlace(0, 2, "first", 29400))])
def test_ranks_are_numbered_from_outside_or_by_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, place: NodePlace | None
) -> None:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadVariable, match=r"RANK and WORLD_SIZE are set.*unset them, or omit --ranks and --nodes"):
        main(Settings(bootstrap="nowhere:1", home=tmp_path), config(tmp_path), ranks, place=place)


def test_rank_0_serves_the_store_until_the_others_have_left() -> None:
    port = free_port()
    ranks = [rank(RANKS, number, port) for number in range(2)]
    try:
        assert [process.communicate(timeout=120)[0] for process in ranks] == ["{'sum': [0, 1]}\n"] * 2
        assert [process.returncode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_rank_that_comes_back_alone_ends_the_others() -> None:
    port = free_port()
    ranks = [rank(ALONE_AGAIN, number, port) for number in range(2)]
    try:
        assert ranks[1].wait(120) == 9
        ranks.append(rank(ALONE_AGAIN, 1, port))
        first, again = (process.communicate(timeout=120)[0] for process in (ranks[0], ranks[2]))
        assert "rank 1 was started again alone" in first and "rank 1 was started again alone" in again
        assert (ranks[0].returncode, ranks[2].returncode) == (1, 1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
