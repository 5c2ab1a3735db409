"""Members of a group that meet on a store and watch each other through it: launchers of nodes, and ranks.

Each gives a sign of life every second. A member that says that it ends, or gives none, is lost to the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""A member that gives no sign of life for so long is lost."""
STORE_TIMEOUT = timedelta(seconds=30)
TELL_SECONDS = 1.0
READ_SECONDS = 2.5
"""A member that serves the store and ends gives the others so long to read its message: each looks every second."""

_ENDED = "ended"
"""Key: which member ended before its work was done, and why. Each member says that it has read it (`_read`)."""
_FINISHED = "finished"


class MemberLost(Exception):
    """Another member of the group ended or does not answer. The message names it."""


class AlreadyDone(Exception):
    """This member has done its work in the group before, and was started again."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of this process in its group: member `index` of `count`.

    Attributes:
        noun: what a member is in messages, such as `node`.
        server: whoever serves the store, in messages; such as `node 0`.
        address: host and port of the store.
        serves_store: this member serves the store; the others lose it when this one ends.
    """

    noun: str
    index: int
    count: int
    server: str
    address: str
    serves_store: bool = False


class Members:
    """This process's part in its group."""

    def __init__(self, membership: Membership, store: Store) -> None:
        """`store`: no other thread may wait on its connection."""
        self._own, self._store = membership, store
        self._others = [member for member in range(membership.count) if member != membership.index]
        self._missing = tuple(self._others)
        self._unfinished = tuple(self._others)
        self._beating = Lock()
        self._finished = False
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float, int]] = {}
        self._look: Future[str] | None = None
        self._look_began = 0.0
        self._checked = time.monotonic()
        self._stale: Future[str] | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The members that had not come at the last look."""
        return self._missing

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The other members that had not finished at the last look."""
        return self._unfinished

    @property
    def heard(self) -> dict[int, int]:
        """The number of signs of life that were seen of each present member. After the end of a member, the last one
        may still be seen for the first time."""
        return {member: signs for member, (_, _, signs) in dict(self._heard).items()}

    def check(self) -> None:
        """Gives a sign of life, and looks for those of the other members. Does not wait: what it raises may be the
        result of the look that an earlier call began. Raises MemberLost."""
        now = time.monotonic()
        if now - self._checked > PATIENCE_SECONDS / 2:
            # This process stood still, as in a paused container: the others get their time anew.
            self._stale, self._look_began = self._look, now
            self._heard = {member: (beat, now, signs) for member, (beat, _, signs) in dict(self._heard).items()}
        self._checked = now
        look = self._look
        if look is not None and look is not self._stale and look.done() and (lost := look.result()):
            raise MemberLost(lost)
        if self._look is None or (self._look.done() and now - self._look_began >= BEAT_SECONDS):
            self._look, self._look_began = begin(self._look_around), now
        elif not self._look.done() and now - self._look_began > PATIENCE_SECONDS:
            raise MemberLost(f"{self._own.server} has given no sign of life for {PATIENCE_SECONDS:g} s")

    def _look_around(self) -> str:
        """Returns which member is lost, and why; "" if none is."""
        try:
            with self._beating:
                if not self._finished:
                    self._beats += 1
                    self._store.set(_beat(self._own.index), str(self._beats))
            if self._store.check([_ENDED]):
                lost = self._store.get(_ENDED).decode()
                self._store.set(_read(self._own.index), "")
                return lost
            self._missing = tuple(member for member in self._missing if not self._store.check([_beat(member)]))
            come = [member for member in self._others if member not in self._missing]
            found = self._store.multi_get([_beat(member) for member in come]) if come else []
        except RuntimeError as error:  # torch's errors of a lost connection and of an operation that timed out
            return f"{self._own.server} does not answer at {self._own.address}: {first_line(error)}"
        beats = dict(zip(come, found, strict=True))
        self._unfinished = tuple(member for member in self._others if beats.get(member) != _FINISHED.encode())
        return next(filter(None, (self._listen_to(member, beat) for member, beat in beats.items())), "")

    def _listen_to(self, member: int, beat: bytes) -> str:
        if beat == _FINISHED.encode():
            self._heard.pop(member, None)
            return ""
        now = time.monotonic()
        before, since, signs = self._heard.get(member, (None, now, 0))
        if beat != before:
            self._heard[member] = beat, now, signs + 1
        elif now - since > PATIENCE_SECONDS:
            return f"{self._own.noun} {member} has given no sign of life for {PATIENCE_SECONDS:g} s"
        return ""

    def settle(self) -> None:
        """Waits until the present look has ended, at most a second."""
        if self._look is not None:
            wait([self._look], TELL_SECONDS)

    def leave(self, reason: str) -> None:
        """Tells the other members that this one ends before its work is done, such as "ended with exit code 1". They
        find it out by themselves if the store does not take the message within a second. A member that serves the store
        waits until the others have read the message, at most READ_SECONDS."""
        try:
            self._tell("ends", partial(self._declare_ended, reason))
            if self._own.serves_store:
                self._tell("ends", self._wait_for_readers, READ_SECONDS + TELL_SECONDS)
        except MemberLost as error:
            log.warning("%s", error)

    def _declare_ended(self, reason: str) -> None:
        declare_ended(self._store, self._own.noun, self._own.index, reason)
        self._store.set(_read(self._own.index), "")

    def _wait_for_readers(self) -> None:
        deadline = time.monotonic() + READ_SECONDS
        while any(map(self._reads, self._others)) and time.monotonic() < deadline:
            time.sleep(READ_SECONDS / 100)

    def _reads(self, member: int) -> bool:
        """True if a member has come, is not done, and has not read yet that another one ends."""
        if not self._store.check([_beat(member)]) or self._store.check([_read(member)]):
            return False
        return self._store.get(_beat(member)) != _FINISHED.encode()

    def finish(self) -> None:
        """Tells the other members that this one is done. Raises MemberLost."""
        self._tell("is done", self._set_finished, STORE_TIMEOUT.total_seconds())

    def _set_finished(self) -> None:
        with self._beating:
            self._finished = True
            self._store.set(_beat(self._own.index), _FINISHED)

    def _tell(self, what: str, action: Callable[[], None], seconds: float | None = None) -> None:
        limit = TELL_SECONDS if seconds is None else seconds
        try:
            begin(action).result(limit)
        except (RuntimeError, TimeoutError) as error:
            reason = first_line(error) or f"it did not answer within {limit:g} s"
            server, noun = self._own.server, self._own.noun
            raise MemberLost(f"{server} cannot be told that this {noun} {what}: {reason}") from error


def enter(store: Store, noun: str, index: int) -> int:
    """Enters the group on a store with a first sign of life, so that a member that ends at once is lost too. Returns
    how often this member has entered. Raises AlreadyDone, which the others do not notice, and RuntimeError."""
    if store.check([_beat(index)]) and store.get(_beat(index)) == _FINISHED.encode():
        raise AlreadyDone(f"{noun} {index} has done its work already, and the others are about to end: it ends too")
    store.set(_beat(index), "0")
    return store.add(f"joined/{index}", 1)


def declare_ended(store: Store, noun: str, index: int, reason: str) -> None:
    """Tells all members of the group on a store that one has ended. Raises RuntimeError."""
    store.set(_ENDED, f"{noun} {index} {reason}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text: torch adds its own stack."""
    return str(error).partition("\n")[0]


def _beat(member: int) -> str:
    return f"beat/{member}"


def _read(member: int) -> str:
    return f"read/{member}"


def begin(action: Callable[[], T]) -> Future[T]:
    """Begins an operation of a store on a separate thread. torch sets no limit to the time of most operations, so a
    frozen server, or one that lost its power, would hold the caller for ever."""
    future: Future[T] = Future()
    Thread(target=_carry_out, args=(action, future), name="store", daemon=True).start()
    return future


def _carry_out(action: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is read
        future.set_exception(error)
