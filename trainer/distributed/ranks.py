"""The ranks of one trainer: a process group for gradients, and a small channel on its store for everything else.

Collectives run only inside a step, when every rank is known to be ready. All other waiting (for Kafka above all) polls
the channel, so a quiet topic or a slow fetch never hits a collective's timeout.
"""

import itertools
import json
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

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process and the size of the group of ranks that it belongs to."""

    rank: int
    size: int
    store: Store

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


_rank_group: RankGroup | None = None


def join_ranks(device: str = "cpu") -> RankGroup:
    """Joins the world that the launcher describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them, a
    world of size 1. Tensors on a CPU are reduced by gloo, those on a GPU (`device` is `cuda`) by NCCL.

    A process joins once and keeps its world: DeepSpeed remembers the first process group.
    """
    global _rank_group
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if _rank_group is not None:
        return _rank_group
    os.environ.setdefault("LOCAL_RANK", str(rank))
    store: Store
    if size == 1:
        store = HashStore()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=TIMEOUT)
    _rank_group = RankGroup(rank, size, PrefixStore("channel", store))
    return _rank_group


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
        """Returns the next command, or None."""
        key = f"command/{self._rank_group.rank}/{self._commands_received}"
        if not self._store.check([key]):
            return None
        self._commands_received += 1
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    def wait_for_command(self, check: Callable[[], None]) -> Any:
        """Waits for the next command. Calls `check` while waiting; it may raise."""
        while (message := self.next_command()) is None:
            check()
            time.sleep(POLL_SECONDS)
        return message

    def barrier(self, tag: str, check: Callable[[], None]) -> None:
        """Waits until every rank has called it with this tag. Calls `check` while waiting; it may raise."""
        self._store.set(f"{tag}/{self._rank_group.rank}", "here")
        keys = [f"{tag}/{rank}" for rank in range(self._rank_group.size)]
        while not self._store.check(keys):
            check()
            time.sleep(POLL_SECONDS)
