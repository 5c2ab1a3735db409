"""The leases of a pool: a bounded number of places, each held by heartbeats, with at most one episode.

A lease expires if neither a call nor a heartbeat comes; its episode is closed then, with everything that it runs. A
running call holds its lease, and is bounded itself. All methods belong to one event loop.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.records import Task
from tentalis.agents.environments import Environment, EnvironmentFault
from tentalis.agents.environments.stoppable import StuckThread
from tentalis.agents.pool.episode import PoolEpisode
from tentalis.agents.pool.refusals import PoolError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""The pause that a full pool asks for."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`places`: leases at the same time. `lease_s`: seconds without a call or a heartbeat after which a lease expires.
    `call_s`: seconds of one call."""

    places: int = 16
    lease_s: float = 120.0
    call_s: float = 600.0


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. `holder`: number of the allocation that holds it, the newest one. `number`: of its episode, 0 before
    the first one. `broken`: the reason why its episode cannot go on. `running`: the task of the call that works on the
    episode."""

    lease_id: str
    request: tuple[str, str] | None
    seen: float
    holder: int = 1
    number: int = 0
    episode: PoolEpisode | None = None
    broken: str | None = None
    running: "asyncio.Task[object] | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class PoolCounts:
    """Counts since the start. `allocations`: by outcome: new, reused, full. `faults`: of environments."""

    allocations: Counter[str] = field(default_factory=lambda: Counter(new=0, reused=0, full=0))
    expired: int = 0
    faults: int = 0


class LeasePool:
    """See the module docstring. `make` makes the environment of an episode. Methods raise PoolError."""

    def __init__(self, make: Callable[[], Environment], limits: PoolLimits) -> None:
        self.limits = limits
        self.counts = PoolCounts()
        self.stuck: str | None = None
        """The fault of a call whose thread did not end: this process must be replaced. None: all ended."""
        self.must_end = asyncio.Event()
        """Set by `stuck`, and by who stops the process."""
        self._make = make
        self._leases: dict[str, Lease] = {}
        self._requests: dict[tuple[str, str], Lease] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def held(self) -> int:
        """Leases that are held now."""
        return len(self._leases)

    @property
    def ending(self) -> int:
        """Leases that were given back or expired, and whose episodes are being closed. They take a place too."""
        return len(self._ending)

    def allocate(self, task_key: str, request_id: str | None) -> tuple[Lease, bool]:
        """Returns the lease of a request, and True if the request has had it before: a call of an earlier holder is
        refused from now on. `request_id` None: a new lease."""
        if self._stopping:
            raise PoolError(503, "STOPPING", "the pool is stopping")
        self.end_expired()
        request = None if request_id is None else (task_key, request_id)
        if request is not None and (known := self._requests.get(request)) is not None:
            known.seen = self._now()
            known.holder += 1
            self.counts.allocations["reused"] += 1
            return known, True
        if self.held + self.ending >= self.limits.places:
            self.counts.allocations["full"] += 1
            raise PoolError(
                429, "PLACES_EXHAUSTED", f"all {self.limits.places} places of the pool are taken", RETRY_AFTER_S
            )
        lease = Lease(f"run-{uuid.uuid4().hex}", request, self._now())
        self._leases[lease.lease_id] = lease
        if request is not None:
            self._requests[request] = lease
        self.counts.allocations["new"] += 1
        return lease, False

    def heartbeat(self, lease_id: str, holder: int | None) -> None:
        """Holds a lease."""
        self._held(lease_id, holder).seen = self._now()

    async def reset(self, lease_id: str, holder: int | None, task_of: Callable[[Lease], Task]) -> dict[str, object]:
        """Begins an episode, in place of the one before. `task_of` makes its task. Returns the answer of
        PoolEpisode.begin. A call that works on the episode before is cancelled."""
        lease = self._held(lease_id, holder)
        task = task_of(lease)
        lease.number += 1
        if lease.running is not None:
            lease.running.cancel()

        async def begin() -> dict[str, object]:
            await self._close_episode(lease)
            # On a thread: an environment may read its files of tools or tasks.
            lease.episode = PoolEpisode(await asyncio.to_thread(self._make))
            lease.broken = "its reset was interrupted"
            answer = await lease.episode.begin(task)
            lease.broken = None
            return answer

        return await self._working(lease, holder, begin)

    async def evaluate(self, lease_id: str, holder: int | None, answer: str | None) -> dict[str, object]:
        """Returns the answer of PoolEpisode.evaluate. It may take longer than another call if the environment says
        so."""
        return await self.work(lease_id, holder, lambda episode: episode.evaluate(answer), scores=True)

    async def work(
        self,
        lease_id: str,
        holder: int | None,
        work: Callable[[PoolEpisode], Awaitable[T]],
        *,
        scores: bool = False,
    ) -> T:
        """Returns what `work` does with the episode of a lease; one call at a time. `scores`: in the time limit of the
        score."""
        lease = self._held(lease_id, holder)

        async def on_episode() -> T:
            if lease.episode is None:
                raise PoolError(409, "NOT_RESET", f"the lease {lease_id} has no episode: reset it first")
            if lease.broken is not None:
                raise PoolError(409, "BROKEN", f"the episode cannot go on: {lease.broken}; reset the lease")
            return await work(lease.episode)

        return await self._working(lease, holder, on_episode, scores=scores)

    async def close(self, lease_id: str, holder: int | None) -> bool:
        """Gives a lease back, and ends what it runs. Returns False if there is none, or if somebody else holds it."""
        lease = self._leases.get(lease_id)
        if lease is None or holder not in (None, lease.holder):
            return False
        await asyncio.shield(self._end(lease))
        return True

    async def close_all(self) -> None:
        """Ends all leases, and gives no new ones."""
        self._stopping = True
        for lease in list(self._leases.values()):
            self._end(lease)
        await asyncio.gather(*self._ending)

    def end_expired(self) -> None:
        """Ends the leases that nobody holds."""
        now = self._now()
        for lease in list(self._leases.values()):
            if lease.running is None and now - lease.seen > self.limits.lease_s:
                log.warning("the lease %s had no heartbeat for %g s and is closed", lease.lease_id, now - lease.seen)
                self.counts.expired += 1
                self._end(lease)

    async def expire(self) -> None:
        """Ends expired leases, until it is cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.lease_s / 4))
            self.end_expired()

    async def _working(
        self, lease: Lease, holder: int | None, work: Callable[[], Awaitable[T]], *, scores: bool = False
    ) -> T:
        """Returns the result of a call that has the lease alone; its errors are PoolErrors."""
        number = lease.number
        async with lease.lock:
            self._check_current(lease, holder, number)  # all may have changed meanwhile
            limit_s = self.limits.call_s
            if scores and lease.episode is not None:
                limit_s = max(limit_s, lease.episode.score_s or 0.0)
            lease.running = asyncio.current_task()
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await work()
            except asyncio.CancelledError:
                self._check_current(lease, holder, number)
                raise
            except TimeoutError as error:
                if not limit.expired():
                    raise self._fault(lease, f"TimeoutError: {error}") from error
                raise self._fault(lease, f"the call took over {limit_s:g} s") from error
            except StuckThread as error:
                self._stuck_in(error)
                lease.episode = None  # its thread may still change what `close` would free
                self._forget(lease)
                log.error("lease %s: %s", lease.lease_id, error)
                raise self._fault(lease, str(error)) from error
            except EnvironmentFault as error:
                raise self._fault(lease, str(error)) from error
            except PoolError:
                raise
            except Exception as error:
                log.exception("lease %s: the environment has a defect", lease.lease_id)
                raise self._fault(lease, f"{type(error).__name__}: {error}") from error
            finally:
                lease.running = None
                lease.seen = self._now()

    def _fault(self, lease: Lease, reason: str) -> PoolError:
        self.counts.faults += 1
        lease.broken = reason
        return PoolError(500, "ENVIRONMENT_FAULT", reason)

    def _stuck_in(self, error: StuckThread) -> None:
        self.stuck = str(error)
        self.must_end.set()

    def _held(self, lease_id: str, holder: int | None) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise PoolError(404, "UNKNOWN_LEASE", f"Unknown lease {lease_id[:80]}: it was closed, or it expired")
        if holder not in (None, lease.holder):
            raise PoolError(
                409, "OTHER_HOLDER", f"the lease {lease_id} was allocated again: its holder is {lease.holder}"
            )
        return lease

    def _check_current(self, lease: Lease, holder: int | None, number: int) -> None:
        self._held(lease.lease_id, holder)
        if number != lease.number:
            raise PoolError(409, "OTHER_EPISODE", f"the lease {lease.lease_id} has begun another episode")

    def _forget(self, lease: Lease) -> None:
        self._leases.pop(lease.lease_id, None)
        if lease.request is not None:
            self._requests.pop(lease.request, None)

    def _end(self, lease: Lease) -> "asyncio.Task[None]":
        self._forget(lease)
        if lease.running is not None:
            lease.running.cancel()
        task = asyncio.create_task(self._ended(lease), name="env-pool-end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _ended(self, lease: Lease) -> None:
        async with lease.lock:
            await self._close_episode(lease)

    async def _close_episode(self, lease: Lease) -> None:
        """Closes the episode of a lease. A cancellation waits for it: a close that is interrupted leaves things
        behind."""
        episode, lease.episode = lease.episode, None
        if episode is None:
            return
        closing = asyncio.create_task(episode.close(), name="env-pool-close")
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                cancelled = error
        if (problem := closing.exception()) is not None:
            self.counts.faults += 1
            log.error("lease %s: its episode was not closed in order", lease.lease_id, exc_info=problem)
            if isinstance(problem, StuckThread):
                self._stuck_in(problem)
        if cancelled is not None:
            raise cancelled

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
