"""Chooses the replica that answers a call: the one that holds the prompt's prefix, if it is healthy, has the version
and is not overloaded. Pure; the shells report the outcome of every call.

The key of a call stands for its prefix (a session, or the group of a task). Replicas are ordered by a hash of key and
replica (rendezvous hashing), so a replica that comes or goes moves only its own keys. A replica is passed over while it
has more than LOAD_BOUND times its share of the calls in flight (bounded load).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.ids import parse_policy_name
from tentalis.inference.replicas.breaker import BreakerState, CircuitBreaker

LOAD_BOUND = 1.25
FAILURES_PER_CALL = 2
"""Replicas that may fail one call. A request that kills a server must not kill all of them."""
PROBE_INTERVAL_S = 5.0
"""Seconds between two probes of a replica, while there are calls."""


class CallOutcome(StrEnum):
    """The outcome of a call at one replica.

    ok: answered, also by an error that the request caused. failed: no answer, or an error of the server. missing: it
    answered that it has not the version. given_up: the caller did not wait for the end.
    """

    OK = "ok"
    FAILED = "failed"
    MISSING = "missing"
    GIVEN_UP = "given_up"


class RepeatReason(StrEnum):
    """The reason why a call went to a second replica: the first failed, had not the version, or was slow (hedge)."""

    FAILED = "failed"
    MISSING = "missing"
    HEDGE = "hedge"


@dataclass(slots=True)
class ReplicaLease:
    """The place of a call at a replica, until `ReplicaRouter.finish`. `url`: the replica's."""

    url: str
    model: str | None
    epoch: int
    finished: bool = False


@dataclass(slots=True)
class _ReplicaState:
    breaker: CircuitBreaker
    in_flight: int = 0
    probed_at: float = -math.inf
    versions: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """The state of one replica. `versions`: the adapters that it listed last, None before its first answer."""

    state: BreakerState
    in_flight: int
    versions: frozenset[str] | None = None


def is_version(model: str | None) -> bool:
    """True for the name of a version (`policy@vN`), which only some replicas may have loaded."""
    if model is None:
        return False
    try:
        parse_policy_name(model)
    except ValueError:
        return False
    return True


def preferred(key: str, urls: Iterable[str]) -> list[str]:
    """The replicas in the order of preference of a key: the same at every caller and after every restart."""
    return sorted(urls, key=lambda url: hashlib.sha256(f"{key}\n{url}".encode()).digest(), reverse=True)


def load_limit(calls: int, replicas: int) -> int:
    """The largest number of calls in flight at one of `replicas` replicas, if `calls` are in flight at all of them."""
    return math.ceil(LOAD_BOUND * calls / replicas)


class ReplicaRouter:
    """The replicas of one server. `urls`: at least one, each once. `clock`: seconds that only rise. `changed`: called
    with the URL and the new state of a breaker that changed by an outcome."""

    def __init__(
        self,
        urls: Sequence[str],
        clock: Callable[[], float],
        changed: Callable[[str, BreakerState], None] = lambda url, state: None,
    ) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"give the URL of each replica once: {', '.join(urls) or 'none is given'}")
        self._clock, self._changed = clock, changed
        self._replicas = {url: _ReplicaState(CircuitBreaker(clock)) for url in urls}
        self.outcomes: Counter[tuple[str, CallOutcome]] = Counter()
        """Finished calls by replica and outcome."""
        self.repeats: Counter[RepeatReason] = Counter()
        """Calls that went to a second replica, by reason; counted by the shells."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The replicas, in the order in which they were given."""
        return tuple(self._replicas)

    def health(self) -> dict[str, ReplicaHealth]:
        """The state of each replica, by its URL."""
        return {
            url: ReplicaHealth(each.breaker.state, each.in_flight, each.versions)
            for url, each in self._replicas.items()
        }

    def pick(
        self, key: str, model: str | None, *, without: Collection[str] = (), any_state: bool = False
    ) -> ReplicaLease | None:
        """Begins a call of `model` and returns its place, None if no replica may be asked.

        One of several replicas may be asked for a version only if it listed it last, for any other model always.
        `without`: replicas that have failed this call. `any_state`: ask also a replica with an open breaker, if there
        is no other.
        """
        able = [url for url in self._replicas if url not in without and self._has(url, model)]
        allowed = [url for url in able if self._replicas[url].breaker.allows()]
        if allowed:
            chosen = self._within_bound(preferred(key, allowed))
        elif able and any_state:
            chosen = min(preferred(key, able), key=lambda url: self._replicas[url].breaker.open_until)
        else:
            return None
        replica = self._replicas[chosen]
        replica.in_flight += 1
        return ReplicaLease(chosen, model, replica.breaker.begin())

    def able(self, model: str | None, *, without: Collection[str] = (), any_state: bool = False) -> bool:
        """True if `pick` would return a place."""
        return any(
            url not in without and self._has(url, model) and (any_state or each.breaker.allows())
            for url, each in self._replicas.items()
        )

    def finish(self, lease: ReplicaLease, outcome: CallOutcome) -> None:
        """Ends a call. The first outcome of a call counts."""
        if lease.finished:
            return
        lease.finished = True
        self.outcomes[lease.url, outcome] += 1
        replica = self._replicas[lease.url]
        replica.in_flight -= 1
        before = replica.breaker.state
        match outcome:
            case CallOutcome.OK:
                replica.breaker.succeeded(lease.epoch)
            case CallOutcome.MISSING:
                replica.breaker.succeeded(lease.epoch)
                if replica.versions is not None and lease.model is not None:
                    replica.versions -= {lease.model}
            case CallOutcome.FAILED:
                replica.breaker.failed(lease.epoch)
            case CallOutcome.GIVEN_UP:
                replica.breaker.gave_up(lease.epoch)
        self._note_change(lease.url, before)

    def due_probes(self, model: str | None = None) -> list[str]:
        """The replicas to probe now: each once per PROBE_INTERVAL_S, and all if none has listed the version `model`."""
        now, all_due = self._clock(), self.lacks(model)
        due = [url for url, each in self._replicas.items() if all_due or now - each.probed_at >= PROBE_INTERVAL_S]
        for url in due:
            self._replicas[url].probed_at = now
        return due

    def probed(self, url: str, models: Iterable[str] | None) -> None:
        """A probe has ended with the names of the models that the replica lists; None if it did not answer.

        A replica that did not answer keeps its versions: its breaker alone decides whether it is asked.
        """
        replica = self._replicas[url]
        before = replica.breaker.state
        replica.breaker.probed(models is not None)
        self._note_change(url, before)
        if models is not None:
            replica.versions = frozenset(name for name in models if is_version(name))

    def lacks(self, model: str | None) -> bool:
        """True if no replica has listed the version `model`."""
        return not any(self._has(url, model) for url in self._replicas)

    def _note_change(self, url: str, before: BreakerState) -> None:
        now = self._replicas[url].breaker.state
        if now is not before:
            self._changed(url, now)

    def _has(self, url: str, model: str | None) -> bool:
        versions = self._replicas[url].versions
        # A single replica is asked for anything: there is no better one, and its refusal is the answer.
        listed = len(self._replicas) == 1 or (versions is not None and model in versions)
        return listed or not is_version(model)

    def _within_bound(self, ordered: Sequence[str]) -> str:
        loads = {url: self._replicas[url].in_flight for url in ordered}
        limit = load_limit(sum(loads.values()) + 1, len(ordered))
        return next(url for url in ordered if loads[url] < limit)
