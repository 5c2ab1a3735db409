"""The limits of a soak on growth, lag, open state, warnings and loss, each with its reason. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

SETTLED_S = 280.0
"""Seconds until remembered state has its final size: scoring and hinting remember results for twice the soak's memory
of 120 s."""
FLAT_FROM = 3
"""Growth is judged after the first 1/FLAT_FROM of a run: allocators and caches take minutes to reach their size."""
GROWTH_MIB_H = 12.0
"""Limit of a process's growth. At 75 tasks per second this is 47 B per task in a process that sees all of them, 93 B in
one of two joins, 466 B per turn at 7.5 turns per second: less than any object kept per task or turn. In the judged part
of half an hour it is 4 MiB; resident memory fluctuates by less than that."""
LAG_S = 10.0
"""Limit of a process's lag at any measurement, in seconds of the process's load. Tasks of this load expire 12 s after
they open: more lag than that would change the outputs. A process that is too slow by half a percent has this lag after
half an hour."""
HELD = 0.25
"""Limit of the growth of open or remembered state in the judged part, as a share. With some 400 open tasks this is
reached if one task in seven hundred is never closed; the open state fluctuates by a tenth."""
ANSWERED = 0.9
"""Share of the measurements at which every process must answer: with fewer, the run cannot be judged."""


@dataclass
class Seen:
    """The measurements at n times, `at` seconds after the load began: float[n] each.

    For each process its resident memory (MiB, without RocksDB's buffers, which have a separate limit), its lag
    (records) and the records that it has confirmed since its start; `held`: the state of all applications together.
    """

    at: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    lag: dict[str, list[float]] = field(default_factory=dict)
    confirmed: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, list[float]] = field(default_factory=dict)
    unanswered: int = 0


@dataclass(frozen=True)
class End:
    """The end of a run: processes that ended by themselves, log lines at WARNING or above, losses, state left open
    after the load, and dead letters (all sent records were valid)."""

    ended: Sequence[str] = ()
    complaints: Sequence[str] = ()
    lost: Sequence[str] = ()
    left_open: Mapping[str, float] = field(default_factory=dict)
    dead_letters: float = 0.0


def reasons(seen: Seen, end: End) -> list[str]:
    """The reasons why a soak failed; empty if it passed."""
    found = [*end.ended]
    found += [f"{name}: {left:,.0f} left open after the load" for name, left in end.left_open.items() if left]
    for what, said in (("lost", end.lost), ("warnings", end.complaints)):
        if said:
            found.append(f"{what}: {len(said):,}, the first: {said[0]}")
    if end.dead_letters:
        found.append(f"{end.dead_letters:,.0f} dead letters of valid records")
    looks = len(seen.at) + seen.unanswered
    if len(seen.at) < max(2, ANSWERED * looks):
        return [*found, f"{len(seen.at)} of {looks} measurements were answered by every process: too few to judge"]
    return found + _behind(seen) + _grown(seen)


def flat_from(seen: Seen) -> float | None:
    """The second from which growth is judged; None if the run is too short for its state to be settled by then."""
    third = seen.at[-1] / FLAT_FROM if seen.at else 0.0
    return third if third >= SETTLED_S else None


def growth(at: Sequence[float], values: Sequence[float], since: float) -> float:
    """The Theil-Sen slope per second of the values since a moment: the median of the slopes between any two
    measurements, which a few outliers do not affect."""
    points = [(moment, value) for moment, value in zip(at, values, strict=True) if moment >= since]
    slopes = [(y - x) / (later - earlier) for (earlier, x), (later, y) in combinations(points, 2)]
    return median(slopes) if slopes else 0.0


def per_second(seen: Seen, name: str) -> float:
    """The records that a process confirmed per second."""
    confirmed = seen.confirmed[name]
    return (confirmed[-1] - confirmed[0]) / (seen.at[-1] - seen.at[0])


def _behind(seen: Seen) -> list[str]:
    found = []
    for name, lag in seen.lag.items():
        rate, most = per_second(seen, name), max(lag)
        if not rate:
            found.append(f"{name}: no record confirmed")
        elif most > LAG_S * rate:
            found.append(
                f"{name}: {most:,.0f} records behind, {most / rate:.1f} s of its load; the limit is {LAG_S:g} s"
            )
    return found


def _grown(seen: Seen) -> list[str]:
    since = flat_from(seen)
    if since is None:
        return []
    found = []
    for name, memory in seen.memory.items():
        slope = 3600 * growth(seen.at, memory, since)
        if slope > GROWTH_MIB_H:
            found.append(f"{name}: memory grows by {slope:.1f} MiB/h; the limit is {GROWTH_MIB_H:g}")
    for name, held in seen.held.items():
        middle = median(value for at, value in zip(seen.at, held, strict=True) if at >= since)
        more = growth(seen.at, held, since) * (seen.at[-1] - since)
        if more > HELD * (middle - more / 2):
            found.append(f"{name}: grew by {more:,.0f} in {seen.at[-1] - since:.0f} s; the median is {middle:,.0f}")
    return found
