"""The ranks of one trainer: a process group for gradients, and a small channel on its store for everything else.

Collectives run only inside a step, when every rank is known to be ready. All other waiting (for Kafka above all) polls
the channel, so a quiet topic or a slow fetch never hits a collective's timeout.
"""

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from trainer.distributed.rank_place import LOCAL_RANK, LOCAL_WORLD_SIZE, RankPlace, rank_place
from trainer.distributed.store import serve_store

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
POLL_SECONDS = 0.02
LEAVE_SECONDS = 30.0

_AGAIN = "again"
"""Key: the number of a rank that entered the store twice."""


class RankLost(Exception):
    """Another rank ended, or cannot be reached. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process and the size of the group of ranks that it belongs to. `serves_store`: the other ranks need this
    process for their store."""

    rank: int
    size: int
    store: Store
    serves_store: bool = False

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place; float64 [k]. A collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: T | None) -> T:
        """Returns rank 0's value on every rank; that of the other ranks does not count. A collective."""
        values: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        found: T = values[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, ordered by rank. A collective."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def check_peers(self) -> None:
        """Raises RankLost if a rank was started again while this one ran: it has lost what this one waits for."""
        if self.size > 1 and self.store.check([_AGAIN]):
            raise _started_alone(self.store.get(_AGAIN).decode())

    def leave(self) -> None:
        """Tells the others that this rank is done. If it serves their store, it waits until they are done too, at most
        30 s. Raises RankLost."""
        self.store.set(f"left/{self.rank}", "")
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.serves_store and (left := self._still_there()):
            self.check_peers()
            if time.monotonic() > deadline:
                log.warning("the ranks %s have not ended within %g s of this one", left, LEAVE_SECONDS)
                return
            time.sleep(POLL_SECONDS)

    def _still_there(self) -> str:
        ranks = (rank for rank in range(self.size) if not self.store.check([f"left/{rank}"]))
        return ", ".join(map(str, ranks))


_rank_group: RankGroup | None = None


def join_ranks(device: str = "cpu") -> RankGroup:
    """Joins the group of ranks that the variables of `rank_place` describe; without them, a group of one. Tensors on a
    CPU are reduced by gloo, those on a GPU (`device` is `cuda`) by NCCL.

    A process joins once and keeps its group: DeepSpeed remembers the first process group. Raises BadVariable,
    PortTaken, RankLost.
    """
    global _rank_group
    if _rank_group is not None:
        return _rank_group
    place = rank_place()
    # DeepSpeed reads the first.
    os.environ |= {LOCAL_RANK.name: str(place.local_rank), LOCAL_WORLD_SIZE.name: str(place.local_size)}
    store: Store
    if place.size == 1:
        store = HashStore()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        store = PrefixStore(f"start {place.restarts}", _open_store(place))
    channel = PrefixStore("channel", store)
    if channel.add(f"joined/{place.rank}", 1) > 1:
        channel.set(_AGAIN, str(place.rank))
        raise _started_alone(str(place.rank))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=place.rank, world_size=place.size, timeout=TIMEOUT
    )
    _rank_group = RankGroup(place.rank, place.size, channel, _serves_store(place))
    return _rank_group


def _serves_store(place: RankPlace) -> bool:
    return place.size > 1 and place.rank == 0 and not place.store_is_served


def _open_store(place: RankPlace) -> TCPStore:
    if _serves_store(place):
        return serve_store(place.port, "store of the trainer's ranks", "MASTER_PORT", TIMEOUT)
    try:
        return TCPStore(place.host, place.port, is_master=False, timeout=TIMEOUT)
    except dist.DistError as error:
        raise RankLost(
            f"rank {place.rank} finds no store at MASTER_ADDR={place.host} MASTER_PORT={place.port} within "
            f"{TIMEOUT.total_seconds():g} s: start all ranks together, with the address of rank 0 ({error})"
        ) from error


def _started_alone(rank: str) -> RankLost:
    return RankLost(f"rank {rank} was started again alone: all ranks end, and must be started together")


_channels = itertools.count()


class RankChannel:
    """An ordered JSON message channel between rank 0 and all ranks, read by polling."""

    def __init__(self, rank_group: RankGroup) -> None:
        """Opens a channel. Every rank must open the same channels in the same order."""
        self._rank_group = rank_group
        self._store = PrefixStore(str(next(_channels)), rank_group.store)
        self._reports_sent = 0
        self._commands_received = 0
        self._commands_sent = 0
        self._reports_received = [0] * rank_group.size

    def send_report(self, message: Any) -> None:
        """Sends a message to rank 0."""
        self._store.set(f"report/{self._rank_group.rank}/{self._reports_sent}", json.dumps(message))
        self._reports_sent += 1

    def receive_reports(self) -> list[Any]:
        """On rank 0: returns the reports of all ranks since the last call."""
        reports = []
        for rank in range(self._rank_group.size):
            while self._store.check([key := f"report/{rank}/{self._reports_received[rank]}"]):
                reports.append(json.loads(self._store.get(key)))
                self._store.delete_key(key)
                self._reports_received[rank] += 1
        return reports

    def send_command(self, message: Any) -> None:
        """On rank 0: sends a command to every rank, including itself."""
        for rank in range(self._rank_group.size):
            self._store.set(f"command/{rank}/{self._commands_sent}", json.dumps(message))
        self._commands_sent += 1

    def next_command(self) -> Any | None:
        """Returns the next command, or None. Raises RankLost."""
        self._rank_group.check_peers()
        key = f"command/{self._rank_group.rank}/{self._commands_received}"
        if not self._store.check([key]):
            return None
        self._commands_received += 1
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    def wait_for_command(self, check: Callable[[], None]) -> Any:
        """Waits for the next command. Calls `check` while waiting; it may raise. Raises RankLost."""
        while (message := self.next_command()) is None:
            check()
            time.sleep(POLL_SECONDS)
        return message

    def barrier(self, tag: str, check: Callable[[], None]) -> None:
        """Waits until every rank has called it with this tag. Calls `check` while waiting; it may raise. Raises
        RankLost."""
        self._store.set(f"{tag}/{self._rank_group.rank}", "here")
        keys = [f"{tag}/{rank}" for rank in range(self._rank_group.size)]
        while not self._store.check(keys):
            check()
            self._rank_group.check_peers()
            time.sleep(POLL_SECONDS)
