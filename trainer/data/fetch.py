"""Fetches the rollouts of a plan, from memory or from the log; each is checked against its key and digest."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from schemas import topics
from schemas.digest import digest_holds
from schemas.place import RecordPlace
from schemas.records import PlanRow, Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.service import tracing
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class RolloutProblem:
    """A planned rollout that cannot be trained on. `kind`: missing, forgotten or forged."""

    kind: str
    rollout_id: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.rollout_id}: {self.detail}"


class BadRollouts(RuntimeError):
    """Planned rollouts are missing, forgotten or forged."""

    def __init__(self, problems: Sequence[RolloutProblem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclass(slots=True)
class RolloutCache:
    """The most recently read rollouts, by place, up to CACHE_BYTES."""

    traces: dict[str, str] = field(default_factory=dict)
    """The trace contexts of the rollouts, by key, while tracing is on."""
    _rollouts: OrderedDict[tuple[int, int], Rollout] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def put(self, partition: int, offset: int, rollout: Rollout, traceparent: str | None = None) -> None:
        """Keeps a rollout, and evicts the oldest ones beyond the limit."""
        self.keep_trace(rollout.rollout_id, traceparent)
        if (partition, offset) not in self._rollouts:
            self._rollouts[partition, offset] = rollout
            self._bytes += _memory_bytes(rollout)
        while self._bytes > CACHE_BYTES:
            evicted = self._rollouts.popitem(last=False)[1]
            self._bytes -= _memory_bytes(evicted)
            self.traces.pop(evicted.rollout_id, None)

    def keep_trace(self, rollout_id: str, traceparent: str | None) -> None:
        """Keeps the trace context of a rollout."""
        if traceparent is not None:
            self.traces[rollout_id] = traceparent

    def take(self, row: PlanRow) -> Rollout | None:
        """Removes and returns the rollout of a row."""
        rollout = self._rollouts.pop((row.partition, row.offset), None)
        if rollout is not None:
            self._bytes -= _memory_bytes(rollout)
        return rollout


def _memory_bytes(rollout: Rollout) -> int:
    # Objects and strings around the arrays take about as much memory as a short rollout's arrays.
    return 2048 + 2 * len(rollout.token_ids) + 3 * len(rollout.sampler_logprobs)


def fetch(settings: Settings, codec: Codec, rows: Iterable[PlanRow], cache: RolloutCache) -> dict[str, Rollout]:
    """Returns the rollouts of the rows by key. A rollout that is not in the cache is read at its planned offset, then
    searched for in the whole topic, because the topic may have been copied, even to other partitions. Raises
    BadRollouts."""
    found: dict[str, Rollout] = {}
    missing: dict[str, PlanRow] = {}
    for row in rows:
        rollout = cache.take(row)
        if rollout is not None and rollout.rollout_id == row.rollout_id and rollout.digest == row.digest:
            found[row.rollout_id] = rollout
        else:
            missing[row.rollout_id] = row
    for start, end in _search_ranges(missing):
        if not missing:
            break
        for stored, rollout in readable_rollouts(settings, codec, start, end):
            wanted = missing.get(rollout.rollout_id)
            is_same = wanted is not None and rollout.digest == wanted.digest
            if is_same and not rollout.forgotten and digest_holds(rollout):
                found[rollout.rollout_id] = rollout
                cache.keep_trace(rollout.rollout_id, tracing.traceparent_of(stored.headers))
                del missing[rollout.rollout_id]
    if missing:
        raise BadRollouts(find_problems(settings, codec, missing.values()))
    return found


def look_up_rollouts(settings: Settings, codec: Codec, rows: Iterable[PlanRow]) -> dict[str, Rollout]:
    """Returns the rollouts that are on the topic for the planned rows, by key, unchecked; the redacted one if a rollout
    was forgotten since."""
    rows = list(rows)
    planned = {row.rollout_id for row in rows}
    offsets = _offsets_by_partition(rows)
    # `end` names the only partitions to read; a redacted rollout comes after the one that it replaces.
    ends = {p: end for p, end in end_offsets(settings, topics.ROLLOUTS).items() if p in offsets}
    found: dict[str, Rollout] = {}
    for _, rollout in readable_rollouts(settings, codec, {p: min(o) for p, o in offsets.items()}, ends):
        if rollout.rollout_id in planned and (rollout.rollout_id not in found or rollout.forgotten):
            found[rollout.rollout_id] = rollout
    return found


def find_stored(settings: Settings, codec: Codec, rows: Iterable[PlanRow]) -> list[Stored]:
    """Returns the records of the planned rollouts as they are stored, in log order per partition, searched for like
    `fetch` does; without those that are no longer on the topic."""
    missing = {row.rollout_id: row for row in rows}
    found: list[Stored] = []
    for start, end in _search_ranges(missing):
        if not missing:
            break
        for stored, rollout in readable_rollouts(settings, codec, start, end):
            row = missing.get(rollout.rollout_id)
            if row is not None and rollout.digest == row.digest:
                found.append(stored)
                del missing[rollout.rollout_id]
    return found


def _search_ranges(missing: Mapping[str, PlanRow]) -> Iterator[tuple[dict[int, int], dict[int, int] | None]]:
    """Yields the places to search for the rollouts missing at that time: (first offset, offset after the last) per
    partition."""
    offsets = _offsets_by_partition(missing.values())
    yield {p: min(o) for p, o in offsets.items()}, {p: max(o) + 1 for p, o in offsets.items()}
    yield {}, None


def _offsets_by_partition(rows: Iterable[PlanRow]) -> dict[int, list[int]]:
    offsets: dict[int, list[int]] = {}
    for row in rows:
        offsets.setdefault(row.partition, []).append(row.offset)
    return offsets


def rows_at(rows: Iterable[PlanRow], places: Mapping[str, tuple[int, int]]) -> list[PlanRow]:
    """Returns the rows that are in `places` (rollout id -> partition and offset), at these places."""
    return [
        row.model_copy(update=dict(zip(("partition", "offset"), places[row.rollout_id], strict=True)))
        for row in rows
        if row.rollout_id in places
    ]


def find_problems(
    settings: Settings,
    codec: Codec,
    rows: Iterable[PlanRow],
    unreadable: list[str] | None = None,
    places: dict[str, tuple[int, int]] | None = None,
) -> list[RolloutProblem]:
    """Reads the whole rollout topic and returns the problems of the planned rollouts; empty if all can be trained on.

    A key with a record of another digest, or whose content does not match its digest, is forged, even if the planned
    record is present too; a redacted rollout is exempt. Invalid records are added to `unreadable`, with place and
    reason. `places` receives partition and offset of the rollouts without a problem.
    """
    planned = {row.rollout_id: row for row in rows}
    genuine: set[str] = set()
    forgotten: set[str] = set()
    problems: list[RolloutProblem] = []
    for stored, rollout in readable_rollouts(settings, codec, unreadable=unreadable):
        row = planned.get(rollout.rollout_id)
        if row is None:
            continue
        place = stored.place
        if rollout.digest != row.digest:
            problems.append(
                RolloutProblem(
                    "forged", row.rollout_id, f"{place} has digest {rollout.digest}, the plan names {row.digest}"
                )
            )
        elif rollout.forgotten:
            forgotten.add(row.rollout_id)
        elif not digest_holds(rollout):
            problems.append(
                RolloutProblem(
                    "forged", row.rollout_id, f"{place} has content that does not match its digest {rollout.digest}"
                )
            )
        else:
            genuine.add(row.rollout_id)
            if places is not None:
                places[row.rollout_id] = stored.partition, stored.offset
    forged = {problem.rollout_id for problem in problems}
    for key, row in planned.items():
        place = RecordPlace(topics.ROLLOUTS, row.partition, row.offset)
        if key in forged:
            continue
        if key in forgotten:
            # Also if compaction has not removed the content yet.
            problems.append(
                RolloutProblem("forgotten", key, f"its content was removed on request (planned from {place})")
            )
        elif key not in genuine:
            problems.append(RolloutProblem("missing", key, f"no longer on the topic (planned from {place})"))
    if places is not None:
        for problem in problems:
            # Content that is forged, or that compaction has not removed yet.
            places.pop(problem.rollout_id, None)
    return problems


def readable_rollouts(
    settings: Settings,
    codec: Codec,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    unreadable: list[str] | None = None,
) -> Iterator[tuple[Stored, Rollout]]:
    """Yields the readable records. `start` and `end` as in `read_to_end`."""
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start, end=end):
        if stored.value is None:
            continue
        try:
            record = stored.decode(codec)
        except DecodeError as error:
            log.debug("skipped: %s", error)
            if unreadable is not None:
                unreadable.append(str(error))
            continue
        if isinstance(record, Rollout):
            yield stored, record
