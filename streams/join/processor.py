"""The join as a stream application: decodes halves, folds them, encodes what comes out."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Hint, Open, Outcome, OutcomeKind, Record, Rollout, Score, Terms, Tick
from streams.delivery import FRAMING_BYTES, size_of
from streams.dlq import Produce, key_bytes
from streams.join.core import BEGINNING, Limits, Partition, Refused, Tally
from streams.join.emit import Emission, Place
from streams.join.room import Bound, Load, Room
from streams.join.state import TASK, Phase, phase_and_since
from streams.join.traces import Traces
from streams.pairing import HORIZON_MS
from streams.placement import Misplaced, check_place
from streams.processor import Dead, Effects, LogRecord, Output, in_turns
from tentalis import metrics, tracing
from tentalis.kafka import headers_of, now_ms
from tentalis.metrics import Exporter

APP_ID = "tentalis-join"
KEPT_BYTES = FRAMING_BYTES + 64
"""What the changelog adds to a half: key, applied offset, framing."""


def limits_of(marker_ttl_ms: int) -> Limits:
    """The limits of a join that remembers closed tasks for so long (log time).

    Raises ValueError if it would forget tasks of the default terms before they are over, or before their first feedback
    may have come.
    """
    shortest = max(Terms().deadline_ms, HORIZON_MS)
    if marker_ttl_ms <= shortest:
        raise ValueError(
            f"closed tasks must be remembered for more than {shortest // 1000:,} s: so long is the deadline of a task "
            "that names none, and so long may feedback wait for its result. Choose a time above the longest deadline "
            "of your tasks and above what their first feedback may take"
        )
    return Limits(marker_ttl_ms=marker_ttl_ms)


class JoinProcessor:
    """`streams.processor.Processor` of the join. Owns the dead-letter topic of the halves.

    Args:
        codec: reads halves, writes rollouts and outcomes.
        limits: how long closed tasks are remembered, how large groups may be.
        record_limit: bytes of the largest record that the topics take, with key and headers.
        bound: how much may be open before the input waits.
    """

    def __init__(
        self,
        codec: Codec,
        limits: Limits | None = None,
        record_limit: int | None = None,
        bound: Bound | None = None,
    ) -> None:
        self.app_id = APP_ID
        self.topics: tuple[str, ...] = (topics.HALVES,)
        self.table: str | None = "state"
        self.partitions: dict[int, Partition] = {}
        self._codec = codec
        self._limits = limits or Limits()
        self._room = Room(bound or Bound(), self._loads, "tasks")
        self._record_limit = record_limit or topics.table().record_limit_bytes
        self._expected = topics.table().records_of(topics.HALVES)
        self._tally = Tally()
        self._outcomes = dict.fromkeys(OutcomeKind, 0)
        self._rollouts = 0
        self._traces = Traces()

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics: totals of what came out, and sizes of what is held."""
        folds, tally = self.partitions, self._tally
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.JOIN_OPEN, lambda: sum(fold.open_tasks for fold in folds.values()))
        exporter.read(metrics.JOIN_REMEMBERED, lambda: sum(fold.markers for fold in folds.values()))
        exporter.read(metrics.JOIN_OPEN_BYTES, lambda: sum(fold.open_bytes for fold in folds.values()))
        exporter.read(metrics.JOIN_PAUSED, self._room.paused)
        exporter.read(metrics.JOIN_OLDEST, self._oldest_seconds)
        exporter.read(
            metrics.JOIN_TIME,
            lambda: {(str(p),): fold.time / 1000 for p, fold in folds.items() if fold.time > BEGINNING},
        )
        exporter.read(metrics.JOIN_OUTCOMES, lambda: {(k.value,): n for k, n in self._outcomes.items()})
        exporter.read(metrics.JOIN_ROLLOUTS, lambda: self._rollouts)
        exporter.read(
            metrics.JOIN_GIVEN_UP,
            lambda: {("hint",): tally.hints_given_up, ("deadline",): tally.deadlines_passed},
        )
        exporter.read(metrics.JOIN_DUPLICATES, lambda: tally.duplicates)

    def _oldest_seconds(self) -> float:
        ages = [fold.time - since for fold in self.partitions.values() if (since := fold.oldest_open) is not None]
        return max(ages, default=0) / 1000

    def waits(self, partition: int) -> bool:
        """Whether a partition is not read on, because too much is open (see `streams.join.room`)."""
        return self._room.waits(partition)

    def full(self) -> str | None:
        """Why nothing is read on; None if something is."""
        return self._room.full()

    def _loads(self) -> dict[int, Load]:
        return {p: Load(fold.open_tasks, fold.open_bytes, fold.time) for p, fold in self.partitions.items()}

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Raises StateError if the entries cannot come from the join."""
        fold = Partition(Place(topics.HALVES, partition), partial(self._read, partition), self._limits, self._tally)
        fold.restore(entries)
        self.partitions[partition] = fold

    def age(self, key: str, value: bytes) -> int | None:
        """Markers are looked for when they are to be forgotten."""
        if not key.startswith(TASK):
            return None
        phase, since = phase_and_since(value)
        return None if phase is Phase.OPEN else since

    def revoke(self, partition: int) -> None:
        """Forgets the partition; its state is on the changelog."""
        self.partitions.pop(partition, None)

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds one batch; records at or before the partition's clock are passed over."""
        fold, effects = self.partitions[partition], Effects()
        async for record in in_turns(records):
            if record.offset <= fold.applied:
                continue
            self._emit(effects, fold.advance(record.offset, record.timestamp))
            # What is unreadable moves time all the same: when it was appended does not depend on what it holds.
            try:
                event = self._decode(record)
                # Not of open tasks: what opened them was in its place.
                if isinstance(event, Open | Score | Hint) and not fold.is_open(event.key):
                    check_place(record)
            except DecodeError as error:
                effects.dead.append(Dead.of(record, error.stage, error))
                continue
            except (Refused, Misplaced) as error:
                effects.dead.append(Dead.of(record, "validate", error))
                continue
            if tracing.enabled():
                self._traces.heard(event, record.headers)
            try:
                self._emit(effects, fold.apply(event, record.value))
            except Refused as error:
                effects.dead.append(Dead.of(record, "validate", error))
        effects.changes = fold.take_changes()
        return effects

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """The clock of each owned partition. What counts is when the broker appends it, not its event time."""
        ticks = [Tick(event_time=now_ms(), partition=partition) for partition in partitions]
        return [self._output(topics.HALVES, tick, tick.partition) for tick in ticks]

    def _read(self, partition: int, offset: int, raw: bytes | None) -> Record:
        return self._codec.decode(raw, topic=topics.HALVES, partition=partition, offset=offset, expected=self._expected)

    def _decode(self, record: LogRecord) -> Record:
        began = time.perf_counter()
        event = self._read(record.partition, record.offset, None if record.tombstone else record.value)
        self._codec.decode_seconds += time.perf_counter() - began
        if event.key != record.key:
            raise Refused(f"the key is {record.key!r}, but this {type(event).__name__} belongs under {event.key!r}")
        if len(record.value) > self._record_limit - KEPT_BYTES:
            # As part of the state it would not fit on the changelog.
            raise Refused(
                f"a half of {len(record.value):,} bytes; the limit is {self._record_limit - KEPT_BYTES:,} "
                "(record_limit_bytes in schemas/topics.yaml, less what a state record adds)"
            )
        return event

    def _emit(self, effects: Effects, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            outcome, rollout = emission.outcome, emission.rollout
            with self._traces.span(outcome) as span:
                traceparent = span.traceparent
            if rollout is not None:
                output = self._output(topics.ROLLOUTS, rollout, traceparent=traceparent)
                size = size_of(Produce(output.topic, key_bytes(output.key), output.value, output.headers))
                if size <= self._record_limit:
                    effects.outputs.append(output)
                    self._rollouts += 1
                else:
                    outcome = _too_large(outcome, size, self._record_limit)
            effects.outputs.append(self._output(topics.OUTCOMES, outcome, traceparent=traceparent))
            self._outcomes[outcome.kind] += 1

    def _output(
        self,
        topic: str,
        record: Outcome | Rollout | Tick,
        partition: int | None = None,
        traceparent: str | None = None,
    ) -> Output:
        headers = tuple(headers_of(record, APP_ID, traceparent))
        return Output(topic, record.key, self._codec.encode(topic, record), headers, partition)


def _too_large(outcome: Outcome, size: int, limit: int) -> Outcome:
    """Each half fitted, the rollout of both does not: the outcome says so, and nothing can be trained on."""
    reason = f"the rollout takes {size:,} bytes; the limit is {limit:,} (record_limit_bytes in schemas/topics.yaml)"
    gone = {"rollout_id": None, "rollout_digest": None, "has_rl": False, "has_opd": False}
    return outcome.model_copy(update=gone | {"not_trainable": reason})
