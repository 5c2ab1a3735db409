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
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from schemas.ids import sha256_hex
from trainer.distributed.store import LOOPBACK, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""A node that gives no sign of life for so long is lost."""
RETRY_SECONDS = 1.0
REPORT_SECONDS = 60.0
CONNECT_TIMEOUT = timedelta(seconds=5)
STORE_TIMEOUT = timedelta(seconds=30)
TELL_SECONDS = 1.0


class BadPlace(ValueError):
    """The place of a node is not complete, or is not one of the nodes."""


class NodeLost(Exception):
    """Another node of the trainer ended or does not answer. The message names it."""


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
        self._place, self._store = place, store
        self._others = [node for node in range(place.count) if node != place.index]
        self._missing = tuple(self._others)
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._look: Future[str] | None = None
        self._look_began = 0.0

    @property
    def missing(self) -> tuple[int, ...]:
        """The nodes that had not come at the last look."""
        return self._missing

    def check(self) -> None:
        """Gives a sign of life, and looks for those of the other nodes. Does not wait: what it raises may be the result
        of the look that an earlier call began. Raises NodeLost."""
        now = time.monotonic()
        if self._look is not None and self._look.done() and (lost := self._look.result()):
            raise NodeLost(lost)
        if self._look is None or (self._look.done() and now - self._look_began >= BEAT_SECONDS):
            self._look, self._look_began = _begin(self._look_around), now
        elif not self._look.done() and now - self._look_began > PATIENCE_SECONDS:
            raise NodeLost(f"node 0 has given no sign of life for {PATIENCE_SECONDS:g} s")

    def _look_around(self) -> str:
        """Returns which node is lost, and why; "" if none is."""
        try:
            self._beats += 1
            self._store.set(f"beat/{self._place.index}", str(self._beats))
            self._missing = tuple(node for node in self._others if not self._store.check([f"joined/{node}"]))
            return next(filter(None, map(self._look_at, sorted({*self._others} - {*self._missing}))), "")
        except RuntimeError as error:  # torch's errors of a lost connection and of an operation that timed out
            return f"node 0 does not answer at {self._place.host}:{self._place.port}: {error}"

    def _look_at(self, node: int) -> str:
        if self._store.check([f"finished/{node}"]):
            return ""
        if self._store.check([f"ended/{node}"]):
            return f"node {node} ended with exit code {self._store.get(f'ended/{node}').decode()}"
        beat = self._store.get(f"beat/{node}") if self._store.check([f"beat/{node}"]) else b""
        now = time.monotonic()
        before, since = self._heard.get(node, (None, now))
        if beat != before:
            self._heard[node] = beat, now
        elif now - since > PATIENCE_SECONDS:
            return f"node {node} has given no sign of life for {PATIENCE_SECONDS:g} s"
        return ""

    def leave(self, exit_code: int) -> None:
        """Tells the other nodes that this one ends before the run does. They find it out by themselves if node 0 does
        not take the message within a second."""
        try:
            self._tell("ended", str(exit_code), TELL_SECONDS)
        except NodeLost as error:
            log.warning("%s", error)

    def finish(self) -> None:
        """Tells the other nodes that the ranks of this one are done. Node 0 waits for the others, who need its store.
        Raises NodeLost."""
        self._tell("finished", "", STORE_TIMEOUT.total_seconds())
        if self._place.index == 0:
            while not self._store.check([f"finished/{node}" for node in self._others]):
                self.check()
                time.sleep(BEAT_SECONDS / 10)

    def _tell(self, what: str, value: str, seconds: float) -> None:
        try:
            _begin(partial(self._store.set, f"{what}/{self._place.index}", value)).result(seconds)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error) or f"it did not answer within {seconds:g} s"
            raise NodeLost(f"node 0 cannot be told that this node {what}: {reason}") from error


def _begin(action: Callable[[], T]) -> Future[T]:
    """Begins an operation of a store on a separate thread. torch sets no limit to the time of most operations, so a
    frozen node 0, or one that lost its power, would hold the caller for ever."""
    future: Future[T] = Future()
    Thread(target=_carry_out, args=(action, future), name="nodes", daemon=True).start()
    return future


def _carry_out(action: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is read
        future.set_exception(error)


def meet_nodes(place: NodePlace, settings_text: str, check: Callable[[], None]) -> NodeMeeting:
    """Returns when all nodes with the same settings have met, however long it takes. `check` is called while waiting;
    it may raise.

    `settings_text`: everything that must be the same on all nodes. A node with other settings, such as during an
    update, waits until node 0 has them too. Raises PortTaken, and what `check` raises.
    """
    waiting, digest = _Report(), sha256_hex(f"{place.count} nodes\n{settings_text}".encode())
    while True:
        check()
        try:
            meeting = _meet_once(place, digest, check, waiting)
            if meeting is not None:
                return meeting
        except (RuntimeError, NodeLost) as error:  # RuntimeError: torch's errors of connections
            waiting.say(f"the nodes meet again: {error}")
        time.sleep(RETRY_SECONDS)


def _meet_once(place: NodePlace, digest: str, check: Callable[[], None], waiting: _Report) -> NodeMeeting | None:
    """Returns a meeting to which all nodes came; None if there is none for this node yet. Raises PortTaken,
    RuntimeError, NodeLost."""
    meeting = _join(place, digest, check, waiting)
    if meeting is not None:
        _wait_for_others(meeting, check, waiting)
    return meeting


def _join(place: NodePlace, digest: str, check: Callable[[], None], waiting: _Report) -> NodeMeeting | None:
    if place.index == 0:
        store = serve_store(place.port, "store of the trainer's nodes", "--rendezvous", STORE_TIMEOUT)
        store.set("settings", digest)
        entered = store, store.add("joined/0", 1)
    else:
        entered = _waited_for(_begin(partial(_enter, place, digest)), check)
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
    store.set_timeout(STORE_TIMEOUT)
    if store.get("settings").decode() != digest:
        return store, 0
    count = store.add(f"joined/{place.index}", 1)
    if count > 1:
        store.set(f"ended/{place.index}", "unknown")
    return store, count


def _waited_for(future: Future[T], check: Callable[[], None]) -> T:
    """Returns a result. Calls `check` while waiting; it may raise. Raises NodeLost, and what the action raises."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not future.done():
        check()
        if time.monotonic() > deadline:
            raise NodeLost(f"node 0 has given no sign of life for {PATIENCE_SECONDS:g} s")
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
