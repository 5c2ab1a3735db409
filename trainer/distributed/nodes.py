"""The launchers of one trainer on several nodes: they meet on a store, watch each other, and end together.

Node 0 serves the store; its ranks and those of the other nodes use it too (ranks.py). A store is used for one meeting:
a launcher that comes back ends the others, and all meet again on a new store. So a supervisor that restarts whatever
ends, such as Kubernetes, is all that a run needs to continue after a node was lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from schemas.ids import sha256_hex
from trainer.distributed import members
from trainer.distributed.members import MemberLost, Members, Membership, begin, declare_ended, enter
from trainer.distributed.store import LOOPBACK, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0
REPORT_SECONDS = 60.0
CONNECT_TIMEOUT = timedelta(seconds=5)


class BadPlace(ValueError):
    """The place of a node is not complete, or is not one of the nodes."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of this machine among the nodes of a trainer: node `index` of `count`. Node 0 is at `host`, and the
    nodes meet at its `port`."""

    index: int
    count: int
    host: str
    port: int

    @property
    def store_host(self) -> str:
        """The host of the store, as this node reaches it."""
        return LOOPBACK if self.index == 0 else self.host


def place_of(index: int, count: int, rendezvous: str | None) -> NodePlace | None:
    """Returns the place that options name; None for a trainer on one machine. `rendezvous`: HOST:PORT of node 0. Raises
    BadPlace."""
    if count == 1:
        if index:
            raise BadPlace(f"--node {index} needs --nodes, the number of machines; without it this is the only one")
        return None
    host, colon, port = (rendezvous or "").rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadPlace(f"--nodes {count} needs --rendezvous HOST:PORT, the address of node 0, the same on all nodes")
    if not 0 <= index < count:
        raise BadPlace(f"--node {index}: with --nodes {count} they are 0 to {count - 1}")
    return NodePlace(index, count, host.strip("[]"), int(port))


class NodeMeeting:
    """This node's part in a meeting of all nodes, from `meet_nodes`."""

    def __init__(self, place: NodePlace, store: TCPStore) -> None:
        own = Membership("node", place.index, place.count, "node 0", f"{place.host}:{place.port}", place.index == 0)
        self._place, self._members = place, Members(own, store)

    @property
    def missing(self) -> tuple[int, ...]:
        """The nodes that had not come at the last look."""
        return self._members.missing

    def check(self) -> None:
        """Gives a sign of life, and looks for those of the other nodes. Does not wait (see `Members.check`). Raises
        MemberLost."""
        self._members.check()

    def leave(self, exit_code: int) -> None:
        """Tells the other nodes that this one ends before the run does."""
        self._members.leave(f"ended with exit code {exit_code}")

    def finish(self) -> None:
        """Tells the other nodes that the ranks of this one are done. Node 0 waits for the others, who need its store.
        Raises MemberLost."""
        self._members.finish()
        while self._place.index == 0 and self._members.unfinished:
            self._members.check()
            time.sleep(members.BEAT_SECONDS / 10)


def meet_nodes(place: NodePlace, settings_text: str, check: Callable[[], None]) -> NodeMeeting:
    """Returns when all nodes with the same settings have met, however long it takes. `check` is called while waiting;
    it may raise.

    `settings_text`: everything that must be the same on all nodes. A node with other settings, such as during an
    update, waits until node 0 has them too. Raises PortTaken, AlreadyDone, and what `check` raises.
    """
    waiting, digest = _Report(), sha256_hex(f"{place.count} nodes\n{settings_text}".encode())
    while True:
        check()
        try:
            meeting = _meet_once(place, digest, check, waiting)
            if meeting is not None:
                return meeting
        except (RuntimeError, MemberLost) as error:  # RuntimeError: torch's errors of connections
            waiting.say(f"the nodes meet again: {error}")
        time.sleep(RETRY_SECONDS)


def _meet_once(place: NodePlace, digest: str, check: Callable[[], None], waiting: _Report) -> NodeMeeting | None:
    """Returns a meeting to which all nodes came; None if there is none for this node yet. Raises PortTaken,
    RuntimeError, MemberLost."""
    meeting = _join(place, digest, check, waiting)
    if meeting is not None:
        _wait_for_others(meeting, check, waiting)
    return meeting


def _join(place: NodePlace, digest: str, check: Callable[[], None], waiting: _Report) -> NodeMeeting | None:
    if place.index == 0:
        store = serve_store(place.port, "store of the trainer's nodes", "--rendezvous", members.STORE_TIMEOUT)
        store.set("settings", digest)
        entered = store, enter(store, "node", 0)
    else:
        entered = _waited_for(begin(partial(_enter, place, digest)), check)
    store, count = entered
    if not count:
        waiting.say("node 0 has other settings, another number of nodes or ranks or another version: waiting for it")
        return None
    if count > 1:
        # This launcher began again. The others end when they read it, and node 0 opens the next meeting.
        waiting.say("this node was in the meeting before: waiting for the next one")
        return None
    return NodeMeeting(place, store)


def _enter(place: NodePlace, digest: str) -> tuple[TCPStore, int]:
    """Returns node 0's store, and how often this node has entered it; 0 with other settings. Raises RuntimeError."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    store.set_timeout(members.STORE_TIMEOUT)
    if store.get("settings").decode() != digest:
        return store, 0
    count = enter(store, "node", place.index)
    if count > 1:
        declare_ended(store, "node", place.index, "ended and was started again")
    return store, count


def _waited_for(future: Future[T], check: Callable[[], None]) -> T:
    """Returns a result. Calls `check` while waiting; it may raise. Raises MemberLost, and what the action raises."""
    deadline = time.monotonic() + members.PATIENCE_SECONDS
    while not future.done():
        check()
        if time.monotonic() > deadline:
            raise MemberLost(f"node 0 has given no sign of life for {members.PATIENCE_SECONDS:g} s")
        time.sleep(RETRY_SECONDS / 20)
    return future.result()


def _wait_for_others(meeting: NodeMeeting, check: Callable[[], None], waiting: _Report) -> None:
    while meeting.missing:
        check()
        meeting.check()
        waiting.say(f"waiting for the nodes {', '.join(map(str, meeting.missing))}")
        time.sleep(RETRY_SECONDS / 10)


class _Report:
    """Logs what is waited for: each new text, and the same one once a minute."""

    def __init__(self) -> None:
        self._text, self._next = "", 0.0

    def say(self, text: str) -> None:
        if text != self._text or time.monotonic() > self._next:
            log.info("%s", text)
            self._text, self._next = text, time.monotonic() + REPORT_SECONDS
