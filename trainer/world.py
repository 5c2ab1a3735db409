"""The ranks of one trainer: the process group for gradients, and a small channel on its store for everything else.

Collectives run only inside a step, when every rank is known to be ready. All waiting, for Kafka above all, is polling
on the channel, so a quiet topic or a slow fetch never runs into a collective's timeout.
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
class World:
    """This process among its peers."""

    rank: int
    size: int
    store: Store

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; float64 [k]. A collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """What every rank passed, by rank. A collective."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found


_world: World | None = None


def join() -> World:
    """The world that the launcher describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them, one of one.

    A process joins once and keeps its world: DeepSpeed remembers the first process group.
    """
    global _world
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if _world is not None:
        return _world
    os.environ.setdefault("LOCAL_RANK", str(rank))
    store: Store
    if size == 1:
        store = HashStore()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size, timeout=TIMEOUT)
    _world = World(rank, size, PrefixStore("channel", store))
    return _world


_channels = itertools.count()


class Channel:
    """Messages between rank 0 and the others, in order, polled for. Plain JSON."""

    def __init__(self, world: World) -> None:
        """Every rank makes the same channels in the same order."""
        self._world = world
        self._store = PrefixStore(str(next(_channels)), world.store)
        self._sent = 0
        self._commands = 0
        self._sent_commands = 0
        self._received = [0] * world.size

    def report(self, message: Any) -> None:
        """To rank 0."""
        self._store.set(f"report/{self._world.rank}/{self._sent}", json.dumps(message))
        self._sent += 1

    def reports(self) -> list[Any]:
        """On rank 0: what all ranks have reported since the last call."""
        found = []
        for rank in range(self._world.size):
            while self._store.check([key := f"report/{rank}/{self._received[rank]}"]):
                found.append(json.loads(self._store.get(key)))
                self._store.delete_key(key)
                self._received[rank] += 1
        return found

    def command(self, message: Any) -> None:
        """From rank 0 to every rank, itself included."""
        for rank in range(self._world.size):
            self._store.set(f"command/{rank}/{self._sent_commands}", json.dumps(message))
        self._sent_commands += 1

    def next_command(self) -> Any | None:
        """The next command, or None."""
        key = f"command/{self._world.rank}/{self._commands}"
        if not self._store.check([key]):
            return None
        self._commands += 1
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    def wait_command(self, check: Callable[[], None]) -> Any:
        """The next command; `check` is called while waiting, and may raise."""
        while (message := self.next_command()) is None:
            check()
            time.sleep(POLL_SECONDS)
        return message

    def gather(self, tag: str, check: Callable[[], None]) -> None:
        """Returns once every rank has called it with this tag; `check` is called while waiting, and may raise."""
        self._store.set(f"{tag}/{self._world.rank}", "here")
        keys = [f"{tag}/{rank}" for rank in range(self._world.size)]
        while not self._store.check(keys):
            check()
            time.sleep(POLL_SECONDS)
