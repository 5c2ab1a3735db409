"""What a soak must not do: grow, fall behind, leave something open, complain, lose. Pure; each bound has its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

SETTLED_S = 280.0
"""When what is remembered has its size: scoring and hinting remember results for twice the soak's memory of 120 s."""
FLAT_FROM = 3
"""Growth is judged in the last two thirds: allocators and caches go on finding their size for minutes."""
GROWTH_MIB_H = 12.0
"""What a process may grow by. At 75 tasks per second this is 47 B per task in a process that sees all of them, 93 B in
one of two joins, 466 B per turn where 7.5 turns come in a second: an object that is kept for each of them is larger.
In half an hour it is 4 MiB in the part that is judged; resident memory goes up and down by less than that."""
LAG_S = 10.0
"""Of what a process reads in a second, how many seconds' worth it may be behind at any look. Tasks of this load are
given up 12 s after they open: more lag than that would change what comes out. One that is too slow by half a percent
has as much in half an hour."""
HELD = 0.25
"""What is open or remembered may grow by this share in the part that is judged. Of some 400 open tasks that is one in
seven hundred that is never closed; what is open goes up and down by a tenth."""
ANSWERED = 0.9
"""Share of the looks at which every process must answer: without them nothing is known."""


@dataclass
class Seen:
    """What was seen at n looks, `at` seconds after the load began: float[n] each.

    Of each process its resident memory (MiB, without RocksDB's buffers, which have a bound of their own), its lag
    (records) and the records that it has confirmed since its start; of the applications together what they `hold`.
    """

    at: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    lag: dict[str, list[float]] = field(default_factory=dict)
    confirmed: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, list[float]] = field(default_factory=dict)
    unanswered: int = 0


@dataclass(frozen=True)
class End:
    """How it ended: processes that ended by themselves, what was said at WARNING or above, what is lost, what was open
    when nothing more came, and dead letters; all sent records were valid."""

    ended: Sequence[str] = ()
    complaints: Sequence[str] = ()
    lost: Sequence[str] = ()
    left_open: Mapping[str, float] = field(default_factory=dict)
    dead_letters: float = 0.0


def reasons(seen: Seen, end: End) -> list[str]:
    """Why a soak has failed; empty if it has not."""
    found = [*end.ended]
    found += [f"{name}: {left:,.0f} left when nothing more came" for name, left in end.left_open.items() if left]
    for what, said in (("lost", end.lost), ("warnings", end.complaints)):
        if said:
            found.append(f"{what}: {len(said):,}, the first: {said[0]}")
    if end.dead_letters:
        found.append(f"{end.dead_letters:,.0f} dead letters of valid records")
    looks = len(seen.at) + seen.unanswered
    if len(seen.at) < max(2, ANSWERED * looks):
        return [*found, f"{len(seen.at)} of {looks} looks were answered by every process: nothing is known"]
    return found + _behind(seen) + _grown(seen)


def flat_from(seen: Seen) -> float | None:
    """From which second on growth is judged; None if the run is too short to be out of its beginnings by then."""
    third = seen.at[-1] / FLAT_FROM if seen.at else 0.0
    return third if third >= SETTLED_S else None


def growth(at: Sequence[float], values: Sequence[float], since: float) -> float:
    """The slope per second from a moment on by Theil and Sen: the median of the slopes between any two looks, which a
    few outliers do not move."""
    points = [(moment, value) for moment, value in zip(at, values, strict=True) if moment >= since]
    slopes = [(y - x) / (later - earlier) for (earlier, x), (later, y) in combinations(points, 2)]
    return median(slopes) if slopes else 0.0


def per_second(seen: Seen, name: str) -> float:
    """Records that a process has confirmed per second."""
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
                f"{name}: {most:,.0f} records behind, {most / rate:.1f} s of its load; the bound is {LAG_S:g} s"
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
            found.append(f"{name}: memory grows by {slope:.1f} MiB/h; the bound is {GROWTH_MIB_H:g}")
    for name, held in seen.held.items():
        middle = median(value for at, value in zip(seen.at, held, strict=True) if at >= since)
        more = growth(seen.at, held, since) * (seen.at[-1] - since)
        if more > HELD * (middle - more / 2):
            found.append(f"{name}: {more:,.0f} more in {seen.at[-1] - since:.0f} s, {middle:,.0f} in the middle")
    return found
