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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from trainer.distributed.members import STORE_TIMEOUT, Members, Membership, declare_ended, enter, first_line
from trainer.distributed.peers import PeerWatch, RankLost, ranks_have
from trainer.distributed.rank_place import LOCAL_RANK, LOCAL_WORLD_SIZE, RankPlace, rank_place
from trainer.distributed.store import LOOPBACK, serve_store

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""All ranks must have come within this time of each other. Limit of a collective."""
START_SECONDS = 1800.0
"""Limit of a rank's wait for the others to load the model and to recover the run."""
POLL_SECONDS = 0.02
REPORT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process and the size of the group of ranks that it belongs to.

    Attributes:
        peers: the watch over the other ranks; None for a single rank.
        serves_store: the other ranks need this process for their store.
    """

    rank: int
    size: int
    store: Store
    peers: PeerWatch | None = None
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
        """Raises RankLost if another rank ended before its work was done, or gives no sign of life."""
        if self.peers is not None:
            self.peers.check()

    def meet(self, tag: str, what: str, check: Callable[[], None], limit: float | None = None) -> None:
        """Waits until every rank has called it with this tag, once. `what`: what a rank has done then, such as
        `loaded the model`. Calls `check` while waiting; it may raise. Raises RankLost, also if ranks are missing after
        `limit` seconds."""
        if self.size == 1:
            return
        self.store.set(f"{tag}/{self.rank}", "here")
        keys = [f"{tag}/{rank}" for rank in range(self.size)]
        wait = _Wait(limit)
        while not self.store.check(keys):
            check()
            self.check_peers()
            wait.report(lambda: f"{ranks_have(self._missing(keys))} not {what}")
            time.sleep(POLL_SECONDS)

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def share_end(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """Returns a context in which the ranks end together: see `PeerWatch.share_end`."""
        return nullcontext() if self.peers is None else self.peers.share_end(check)

    def leave(self) -> None:
        """Tells the others that this rank is done. If it serves their store, it waits until they are done too, at most
        30 s. Raises RankLost."""
        if self.peers is not None:
            self.peers.finish(self.serves_store)


class _Wait:
    """A wait for other ranks: says once a minute what is missing, and ends after `limit` seconds."""

    def __init__(self, limit: float | None) -> None:
        self._limit, self._began = limit, time.monotonic()
        self._next = self._began + REPORT_SECONDS

    def report(self, missing: Callable[[], str]) -> None:
        """Logs what is missing, if it is time to. Raises RankLost after the limit."""
        now = time.monotonic()
        if self._limit is not None and now - self._began > self._limit:
            raise RankLost(f"{missing()} within {self._limit:g} s")
        if now > self._next:
            self._next = now + REPORT_SECONDS
            log.info("waiting: %s", missing())


_rank_group: RankGroup | None = None


def join_ranks(device: str = "cpu", check: Callable[[], None] = lambda: None) -> RankGroup:
    """Joins the group of ranks that the variables of `rank_place` describe; without them, a group of one. Tensors on a
    CPU are reduced by gloo, those on a GPU (`device` is `cuda`) by NCCL. `check` is called while waiting for the other
    ranks; it may raise.

    A process joins once and keeps its group: DeepSpeed remembers the first process group. Raises BadVariable,
    PortTaken, RankLost, AlreadyDone.
    """
    global _rank_group
    if _rank_group is not None:
        return _rank_group
    place = rank_place()
    # DeepSpeed reads the first.
    os.environ |= {LOCAL_RANK.name: str(place.local_rank), LOCAL_WORLD_SIZE.name: str(place.local_size)}
    if place.size == 1:
        store: Store = HashStore()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        group = RankGroup(place.rank, place.size, PrefixStore("channel", store))
    else:
        log.info("rank %d of %d joins the others at %s:%d", place.rank, place.size, place.host, place.port)
        store = _of_this_start(place, _open_store(place))
        peers = _watch_peers(place, store)
        group = RankGroup(place.rank, place.size, PrefixStore("channel", store), peers, _serves_store(place))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with group.share_end(check):
        group.meet("joined", "come", check, TIMEOUT.total_seconds())
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=place.rank, world_size=place.size, timeout=TIMEOUT
        )
    _rank_group = group
    return group


def _watch_peers(place: RankPlace, store: Store) -> PeerWatch:
    """Enters the store as this rank, and watches the others. Raises RankLost if the rank has entered it before,
    AlreadyDone if it was done then."""
    entry = PrefixStore("members", store)
    if enter(entry, "rank", place.rank) > 1:
        again = "was started again alone"
        declare_ended(entry, "rank", place.rank, again)
        raise RankLost(f"rank {place.rank} {again}")
    serves = _serves_store(place)
    host = LOOPBACK if serves else place.host
    # Its own connection: gloo and DeepSpeed wait on the other one.
    connection = TCPStore(host, place.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    own = Membership("rank", place.rank, place.size, _server(place), f"{place.host}:{place.port}", serves)
    members = Members(own, PrefixStore("members", _of_this_start(place, connection)))
    return PeerWatch(members, tells=not place.store_is_served)


def _of_this_start(place: RankPlace, store: TCPStore) -> PrefixStore:
    return PrefixStore(f"start {place.restarts}", store)


def _serves_store(place: RankPlace) -> bool:
    return place.size > 1 and place.rank == 0 and not place.store_is_served


def _server(place: RankPlace) -> str:
    return "the store of whatever started the ranks" if place.store_is_served else "rank 0"


def _open_store(place: RankPlace) -> TCPStore:
    if _serves_store(place):
        return serve_store(place.port, "store of the trainer's ranks", "MASTER_PORT", TIMEOUT)
    try:
        return TCPStore(place.host, place.port, is_master=False, timeout=TIMEOUT)
    except dist.DistError as error:
        raise RankLost(
            f"{_server(place)} is missing: rank {place.rank} finds no store at MASTER_ADDR={place.host} "
            f"MASTER_PORT={place.port} within {TIMEOUT.total_seconds():g} s ({first_line(error)})"
        ) from error


_channels = itertools.count()


class RankChannel:
    """An ordered JSON message channel between rank 0 and all ranks, read by polling."""

    def __init__(self, rank_group: RankGroup) -> None:
        """Opens a channel. Every rank must open the same channels in the same order."""
        self._rank_group = rank_group
        self._number = next(_channels)
        self._store = PrefixStore(str(self._number), rank_group.store)
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

    def wait_for_command(self, check: Callable[[], None], what: str = "sent a command") -> Any:
        """Waits for the next command. `what`: what rank 0 has done then. Calls `check` while waiting; it may raise.
        Raises RankLost, also if none comes within START_SECONDS."""
        wait = _Wait(START_SECONDS)
        while (message := self.next_command()) is None:
            check()
            wait.report(lambda: f"rank 0 has not {what}")
            time.sleep(POLL_SECONDS)
        return message

    def barrier(self, tag: str, what: str, check: Callable[[], None], limit: float | None = None) -> None:
        """Waits until every rank has called it with this tag: see `RankGroup.meet`. Raises RankLost."""
        self._rank_group.meet(f"{self._number}/{tag}", what, check, limit)
