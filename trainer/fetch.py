"""The rollouts of a plan, from memory or from the log, each checked against its key and digest."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.digest import digest_holds
from schemas.place import Place
from schemas.records import PlanRow, Rollout
from tentalis import tracing
from tentalis.config import Settings
from tentalis.kafka import Stored, end_offsets, read_to_end

log = logging.getLogger(__name__)

CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Problem:
    """A planned rollout that cannot be trained on. `kind` is missing, forgotten or forged."""

    kind: str
    rollout_id: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.rollout_id}: {self.detail}"


class BadRollouts(RuntimeError):
    """Planned rollouts are missing, forgotten or forged."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclass(slots=True)
class Cache:
    """The rollouts that were read last, by place, up to CACHE_BYTES."""

    traces: dict[str, str] = field(default_factory=dict)
    """The traces that rollouts came with, by key, while tracing is on."""
    _held: OrderedDict[tuple[int, int], Rollout] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def put(self, partition: int, offset: int, rollout: Rollout, traceparent: str | None = None) -> None:
        """Keeps a rollout, and forgets the oldest ones for it."""
        self.trace(rollout.rollout_id, traceparent)
        if (partition, offset) not in self._held:
            self._held[partition, offset] = rollout
            self._bytes += _size(rollout)
        while self._bytes > CACHE_BYTES:
            forgotten = self._held.popitem(last=False)[1]
            self._bytes -= _size(forgotten)
            self.traces.pop(forgotten.rollout_id, None)

    def trace(self, rollout_id: str, traceparent: str | None) -> None:
        """Keeps the trace that a rollout came with."""
        if traceparent is not None:
            self.traces[rollout_id] = traceparent

    def take(self, row: PlanRow) -> Rollout | None:
        """The rollout of a row, no longer kept."""
        rollout = self._held.pop((row.partition, row.offset), None)
        if rollout is not None:
            self._bytes -= _size(rollout)
        return rollout


def _size(rollout: Rollout) -> int:
    # Objects and strings around the arrays take about as much as a short rollout's arrays.
    return 2048 + 2 * len(rollout.token_ids) + 3 * len(rollout.sampler_logprobs)


def fetch(settings: Settings, codec: Codec, rows: Iterable[PlanRow], cache: Cache) -> dict[str, Rollout]:
    """The rollouts of the rows by key. What is not in the cache is read where it was last seen, then searched for in
    the whole topic, which may have been moved, with other partitions even. Raises BadRollouts.
    """
    found: dict[str, Rollout] = {}
    missing: dict[str, PlanRow] = {}
    for row in rows:
        rollout = cache.take(row)
        if rollout is not None and rollout.rollout_id == row.rollout_id and rollout.digest == row.digest:
            found[row.rollout_id] = rollout
        else:
            missing[row.rollout_id] = row
    for start, end in _searches(missing):
        if not missing:
            break
        for stored, rollout in readable_rollouts(settings, codec, start, end):
            wanted = missing.get(rollout.rollout_id)
            same = wanted is not None and rollout.digest == wanted.digest
            if same and not rollout.forgotten and digest_holds(rollout):
                found[rollout.rollout_id] = rollout
                cache.trace(rollout.rollout_id, tracing.traceparent_of(stored.headers))
                del missing[rollout.rollout_id]
    if missing:
        raise BadRollouts(examine(settings, codec, missing.values()))
    return found


def looked_up(settings: Settings, codec: Codec, rows: Iterable[PlanRow]) -> dict[str, Rollout]:
    """What lies on the topic of planned rollouts, by key, unchecked: a husk of those that were forgotten since."""
    places: dict[int, list[int]] = {}
    planned = set()
    for row in rows:
        places.setdefault(row.partition, []).append(row.offset)
        planned.add(row.rollout_id)
    # `end` names the partitions to read, and only those; a husk lies behind what it replaces.
    ends = {p: end for p, end in end_offsets(settings, topics.ROLLOUTS).items() if p in places}
    found: dict[str, Rollout] = {}
    for _, rollout in readable_rollouts(settings, codec, {p: min(offsets) for p, offsets in places.items()}, ends):
        if rollout.rollout_id in planned and (rollout.rollout_id not in found or rollout.forgotten):
            found[rollout.rollout_id] = rollout
    return found


def _searches(missing: Mapping[str, PlanRow]) -> Iterator[tuple[dict[int, int], dict[int, int] | None]]:
    """Where to look for what is missing at that time: (first offset, offset after the last) per partition."""
    places: dict[int, list[int]] = {}
    for row in missing.values():
        places.setdefault(row.partition, []).append(row.offset)
    yield {p: min(o) for p, o in places.items()}, {p: max(o) + 1 for p, o in places.items()}
    yield {}, None


def examine(
    settings: Settings,
    codec: Codec,
    rows: Iterable[PlanRow],
    unreadable: list[str] | None = None,
    places: dict[str, tuple[int, int]] | None = None,
) -> list[Problem]:
    """Reads the whole rollout topic and says what is wrong with the planned rollouts; nothing means all can be
    trained on.

    A key with a record of another digest, or whose content is not what its digest says, is forged, also when the
    planned record is there too; a husk is exempt. What is no record at all is added to `unreadable`, with its place and
    the reason; `places` gets partition and offset of what is genuine.
    """
    planned = {row.rollout_id: row for row in rows}
    genuine: set[str] = set()
    forgotten: set[str] = set()
    problems: list[Problem] = []
    for stored, rollout in readable_rollouts(settings, codec, unreadable=unreadable):
        row = planned.get(rollout.rollout_id)
        if row is None:
            continue
        place = stored.place
        if rollout.digest != row.digest:
            problems.append(
                Problem("forged", row.rollout_id, f"{place} has digest {rollout.digest}, the plan names {row.digest}")
            )
        elif rollout.forgotten:
            forgotten.add(row.rollout_id)
        elif not digest_holds(rollout):
            problems.append(
                Problem(
                    "forged", row.rollout_id, f"{place} has content that its digest {rollout.digest} does not cover"
                )
            )
        else:
            genuine.add(row.rollout_id)
            if places is not None:
                places[row.rollout_id] = stored.partition, stored.offset
    forged = {problem.rollout_id for problem in problems}
    for key, row in planned.items():
        place = Place(topics.ROLLOUTS, row.partition, row.offset)
        if key in forged:
            continue
        if key in forgotten:
            # Also where compaction has not removed the content yet.
            problems.append(Problem("forgotten", key, f"its content was removed on request (planned from {place})"))
        elif key not in genuine:
            problems.append(Problem("missing", key, f"not on the topic any more (planned from {place})"))
    return problems


def readable_rollouts(
    settings: Settings,
    codec: Codec,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    unreadable: list[str] | None = None,
) -> Iterator[tuple[Stored, Rollout]]:
    """The readable records. `start` and `end` as in `read_to_end`."""
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start, end=end):
        if stored.value is None:
            continue
        try:
            record = stored.decode(codec)
        except DecodeError as error:
            log.debug("passed over: %s", error)
            if unreadable is not None:
                unreadable.append(str(error))
            continue
        if isinstance(record, Rollout):
            yield stored, record
