"""The launchers of one trainer on several nodes: they meet on a store, watch each other, and end together.

Node 0 serves the store; its ranks and those of the other nodes use it too (ranks.py). A store is used for one meeting:
a launcher that comes back ends the others, and all meet again on a new store. So a supervisor that restarts whatever
ends, such as Kubernetes, is all that a run needs to continue after a node was lost.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from schemas.ids import sha256_hex
from tentalis.service.ports import port_taken

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""A node that gives no sign of life for so long is lost."""
RETRY_SECONDS = 1.0
REPORT_SECONDS = 60.0
CONNECT_TIMEOUT = timedelta(seconds=5)
STORE_TIMEOUT = timedelta(seconds=30)


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
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._next_look = 0.0

    def check(self) -> None:
        """Gives a sign of life, and looks for those of the other nodes. Raises NodeLost."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + BEAT_SECONDS
        try:
            self._beats += 1
            self._store.set(f"beat/{self._place.index}", str(self._beats))
            for node in self._others:
                self._look_at(node, now)
        except RuntimeError as error:  # torch's errors of a lost connection and of an operation that timed out
            raise NodeLost(f"node 0 does not answer at {self._place.host}:{self._place.port}: {error}") from error

    def has_joined(self, node: int) -> bool:
        """True if a node has come."""
        return bool(self._store.check([f"joined/{node}"]))

    def _look_at(self, node: int, now: float) -> None:
        if not self.has_joined(node) or self._store.check([f"finished/{node}"]):
            return
        if self._store.check([f"ended/{node}"]):
            raise NodeLost(f"node {node} ended with exit code {self._store.get(f'ended/{node}').decode()}")
        beat = self._store.get(f"beat/{node}") if self._store.check([f"beat/{node}"]) else b""
        before, since = self._heard.get(node, (None, now))
        if beat != before:
            self._heard[node] = beat, now
        elif now - since > PATIENCE_SECONDS:
            raise NodeLost(f"node {node} has given no sign of life for {PATIENCE_SECONDS:g} s")

    def leave(self, exit_code: int) -> None:
        """Tells the other nodes that this one ends before the run does."""
        self._tell(f"ended/{self._place.index}", str(exit_code))

    def finish(self) -> None:
        """Tells the other nodes that the ranks of this one are done. Node 0 waits for the others, who need its store.
        Raises NodeLost."""
        self._tell(f"finished/{self._place.index}", "")
        if self._place.index == 0:
            while not self._store.check([f"finished/{node}" for node in self._others]):
                self.check()
                time.sleep(BEAT_SECONDS / 10)

    def _tell(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            log.warning("the other nodes cannot be told %s: %s", key, error)


def meet_nodes(place: NodePlace, settings_text: str, check: Callable[[], None]) -> NodeMeeting:
    """Returns when all nodes with the same settings have met, however long it takes. `check` is called while waiting;
    it may raise.

    `settings_text`: everything that must be the same on all nodes. A node with other settings, such as during an
    update, waits until node 0 has them too. Raises PortTaken, and what `check` raises.
    """
    waiting = _Report()
    while True:
        check()
        try:
            meeting = _meet_once(place, sha256_hex(settings_text.encode()), check, waiting)
            if meeting is not None:
                return meeting
        except (RuntimeError, NodeLost) as error:  # RuntimeError: torch's errors of connections
            waiting.say(f"the nodes meet again: {error}")
        time.sleep(RETRY_SECONDS)


def _meet_once(place: NodePlace, digest: str, check: Callable[[], None], waiting: _Report) -> NodeMeeting | None:
    """Returns a meeting to which all nodes came; None if there is none for this node yet. Raises PortTaken,
    RuntimeError, NodeLost."""
    meeting = _join(place, digest, waiting)
    if meeting is not None:
        _wait_for_others(place, meeting, check, waiting)
    return meeting


def _join(place: NodePlace, digest: str, waiting: _Report) -> NodeMeeting | None:
    from torch._C._distributed_c10d import TCPStore

    if place.index == 0:
        store = _served_store(place)
        store.set("settings", digest)
    else:
        store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        store.set_timeout(STORE_TIMEOUT)
        if store.get("settings").decode() != digest:
            waiting.say("node 0 has other settings, another number of ranks or another version: waiting for it")
            return None
    if store.add(f"joined/{place.index}", 1) > 1:
        # This launcher began again. The others end when they read it, and node 0 opens the next meeting.
        store.set(f"ended/{place.index}", "unknown")
        waiting.say("this node was in the meeting before: waiting for the next one")
        return None
    return NodeMeeting(place, store)


def _served_store(place: NodePlace) -> TCPStore:
    """Opens the store on every address of node 0. Raises PortTaken."""
    from torch._C._distributed_c10d import TCPStore

    dual = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", place.port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
    except OSError as error:
        raise port_taken("", place.port, "store of the trainer's nodes", error, "--rendezvous") from error
    return TCPStore(
        LOOPBACK,
        place.port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=server.detach(),
    )


def _wait_for_others(place: NodePlace, meeting: NodeMeeting, check: Callable[[], None], waiting: _Report) -> None:
    while missing := [node for node in range(place.count) if not meeting.has_joined(node)]:
        check()
        meeting.check()
        waiting.say(f"waiting for the nodes {', '.join(map(str, missing))}")
        time.sleep(RETRY_SECONDS / 10)


class _Report:
    """Logs what is waited for: each new text, and the same one once a minute."""

    def __init__(self) -> None:
        self._text, self._next = "", 0.0

    def say(self, text: str) -> None:
        if text != self._text or time.monotonic() > self._next:
            log.info("%s", text)
            self._text, self._next = text, time.monotonic() + REPORT_SECONDS
