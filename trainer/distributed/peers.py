"""The other ranks of this one, watched from a thread: when one is gone, this one ends with a message that names it."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from torch.distributed import DistError

from tentalis.service.exit_codes import ExitCode
from trainer.distributed.members import MemberLost, Members, first_line
from trainer.distributed.stop import StopRequested

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""The time in which a rank ends by itself after another one was lost; in a collective it cannot."""
BROKEN_SECONDS = 10.0
"""After a connection broke, a rank that gives no sign of life for so long is lost."""
LEAVE_SECONDS = 30.0


class RankLost(Exception):
    """Another rank ended, or cannot be reached. The message names it and the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: all ranks end, and must be started together")
        self.what = what


class PeerWatch:
    """Watches the other ranks from now on. After one was lost, `check` raises; if this process has not ended some
    seconds later, it is ended with ExitCode.ERROR."""

    def __init__(self, members: Members, tells: bool) -> None:
        """`tells`: the others are told when this rank ends. Otherwise whatever started the ranks ends them then."""
        self._members, self._tells = members, tells
        self._lost = ""
        self._stopped = Event()
        self._thread = Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()
        # A thread in a call of the store would end the interpreter with an abort.
        atexit.register(self.stop)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._members.check()
            except MemberLost as error:
                self._lost = str(error)
                break
            except RuntimeError as error:  # no thread can be started now
                log.warning("the other ranks cannot be looked at: %s", error)
        if not self._stopped.wait(GRACE_SECONDS):
            try:
                print(f"error: {RankLost(self._lost)}", file=sys.stderr, flush=True)
            finally:
                os._exit(ExitCode.ERROR)

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        self._thread.join(POLL_SECONDS * 10)
        self._members.settle()

    def check(self) -> None:
        """Raises RankLost if another rank was lost."""
        if self._lost:
            raise RankLost(self._lost)

    @contextmanager
    def share_end(self, check: Callable[[], None]) -> Iterator[None]:
        """Tells the other ranks, if the block raises, why this one ends. If the error is that of a connection which
        another rank broke, raises RankLost with the name of that rank instead. Calls `check` while it looks for that
        rank; it may raise."""
        try:
            yield
        except BaseException as error:
            lost = self._lost_in(error, check)
            self.stop()
            if self._tells:
                self._members.leave(_reason(error, lost))
            if lost:
                raise RankLost(lost) from error
            raise

    def _lost_in(self, error: BaseException, check: Callable[[], None]) -> str:
        """Returns which rank broke a connection, and so caused an error; "" if none did."""
        # gloo's errors are RuntimeErrors, and name an address at most.
        if type(error) is not RuntimeError and not isinstance(error, DistError):
            return ""
        log.warning("looking for a lost rank after the error: %s", first_line(error))
        began, heard = time.monotonic(), self._members.heard
        while not self._lost and (silent := self._silent_since(heard)):
            check()
            if time.monotonic() - began > BROKEN_SECONDS:
                return f"{ranks_have(silent)} broken the connection and given no sign of life for {BROKEN_SECONDS:g} s"
            time.sleep(POLL_SECONDS)
        return self._lost

    def _silent_since(self, heard: Mapping[int, int]) -> list[int]:
        """Returns the ranks without two new signs of life: one may be from before."""
        now = self._members.heard
        return [rank for rank in self._members.unfinished if now.get(rank, 0) < heard.get(rank, 0) + 2]

    def finish(self, serves_store: bool) -> None:
        """Tells the others that this rank is done. If it serves their store, it waits until they are done too, at most
        LEAVE_SECONDS. Raises RankLost."""
        self.stop()
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            self._members.finish()
            while serves_store and self._members.unfinished:
                if time.monotonic() > deadline:
                    unfinished = ranks_have(self._members.unfinished)
                    log.warning("%s not ended within %g s of this one", unfinished, LEAVE_SECONDS)
                    return
                self._members.check()
                time.sleep(POLL_SECONDS / 10)
        except MemberLost as error:
            raise RankLost(str(error)) from error


def ranks_have(ranks: Sequence[int]) -> str:
    """Returns `rank 1 has` or `the ranks 1, 2 have`."""
    names = ", ".join(map(str, ranks))
    return f"rank {names} has" if len(ranks) == 1 else f"the ranks {names} have"


def _reason(error: BaseException, lost: str) -> str:
    if isinstance(error, StopRequested):
        return "was asked to stop"
    if lost or isinstance(error, RankLost):
        return f"ended: {error.what if isinstance(error, RankLost) else lost}"
    return f"ended: {type(error).__name__}: {first_line(error)}"
