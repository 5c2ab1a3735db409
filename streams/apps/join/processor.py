"""The join as a stream application: decodes halves, folds them, and encodes outcomes and rollouts."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from schemas import topics
from schemas.ids import derived_id
from schemas.records import AuditRecord, Hint, Open, Outcome, OutcomeKind, Record, Rollout, Score, Terms, Tick
from schemas.wire.codec import Codec, DecodeError
from streams.apps.join import metrics
from streams.apps.join.core import JoinCounts, JoinLimits, JoinPartition
from streams.apps.join.emit import Emission, HalvesPartition
from streams.apps.join.given_up import LossAccount, SeenOn
from streams.apps.join.state import TASK, Phase, phase_and_since
from streams.apps.join.traces import Traces
from streams.fold.admission_control import AdmissionControl, OpenBound, PartitionLoad
from streams.fold.clock import BEGINNING
from streams.fold.pairing import HORIZON_MS
from streams.fold.partition import InvalidRecord
from streams.fold.tick_schedule import TickSchedule
from streams.runtime.delivery import FRAMING_BYTES, size_of
from streams.runtime.dlq import Produce, key_bytes
from streams.runtime.metrics import STREAM_DECODE_SECONDS
from streams.runtime.placement import Misplaced, check_place
from streams.runtime.processor import Dead, Effects, LogRecord, LostPartition, OutputRecord, in_turns
from tentalis.kafka import topology
from tentalis.kafka.producer import headers_of
from tentalis.service import tracing
from tentalis.service.metrics import Exporter
from tentalis.text.timestamps import now_ms

APP_ID = topology.named("join").app_id
KEPT_BYTES = FRAMING_BYTES + 64
"""Bytes that the changelog adds to a half: key, applied offset, framing."""


def limits_of(marker_ttl_ms: int) -> JoinLimits:
    """Returns the limits of a join that remembers closed tasks for `marker_ttl_ms` (log time).

    Raises ValueError if tasks could be forgotten before their default deadline, or before their first feedback may
    come.
    """
    shortest = max(Terms().deadline_ms, HORIZON_MS)
    if marker_ttl_ms <= shortest:
        raise ValueError(
            f"closed tasks must be remembered for more than {shortest // 1000:,} s, the longer of the default deadline "
            "and the default feedback horizon. Choose a time above the longest deadline of your tasks and above the "
            "longest wait for their first feedback"
        )
    return JoinLimits(marker_ttl_ms=marker_ttl_ms)


class JoinProcessor:
    """The `streams.runtime.processor.Processor` of the join. Owns the dead-letter topic of the halves.

    Args:
        codec: reads halves, writes rollouts and outcomes.
        limits: how long closed tasks are remembered, and how large groups may be.
        record_limit: bytes of the largest record that the topics accept, with key and headers.
        bound: how much may be open before the input is paused.
        clock: seconds that never go back, by which ticks are sent.
    """

    def __init__(
        self,
        codec: Codec,
        limits: JoinLimits | None = None,
        record_limit: int | None = None,
        bound: OpenBound | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app_id = APP_ID
        self.topics: tuple[str, ...] = (topics.HALVES,)
        self.table: str | None = "state"
        self.outcomes = topics.OUTCOMES
        self.partitions: dict[int, JoinPartition] = {}
        self._codec = codec
        self._limits = limits or JoinLimits()
        self._admission = AdmissionControl(bound or OpenBound(), self._loads, "tasks")
        self._record_limit = record_limit or topics.table().record_limit_bytes
        self._expected = topics.table().records_of(topics.HALVES)
        self._tally = JoinCounts()
        self._outcomes = dict.fromkeys(OutcomeKind, 0)
        self._rollouts = 0
        self._traces = Traces()
        self._schedule = TickSchedule(clock)

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the join: totals of its output, and sizes of its state."""
        folds, tally = self.partitions, self._tally
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.JOIN_OPEN, lambda: sum(fold.open_tasks for fold in folds.values()))
        exporter.read(metrics.JOIN_REMEMBERED, lambda: sum(fold.markers for fold in folds.values()))
        exporter.read(metrics.JOIN_OPEN_BYTES, lambda: sum(fold.open_bytes for fold in folds.values()))
        exporter.read(metrics.JOIN_PAUSED, self._admission.paused)
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
        """Returns true if a partition is paused because too much is open (see `streams.fold.admission_control`)."""
        return self._admission.waits(partition)

    def full(self) -> str | None:
        """Returns the reason why all partitions are paused; None if any is read."""
        return self._admission.full()

    def _loads(self) -> dict[int, PartitionLoad]:
        return {p: PartitionLoad(fold.open_tasks, fold.open_bytes, fold.time) for p, fold in self.partitions.items()}

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores a partition. Raises DamagedState if the entries cannot come from the join."""
        fold = JoinPartition(
            HalvesPartition(topics.HALVES, partition), partial(self._read, partition), self._limits, self._tally
        )
        fold.restore(entries)
        self.partitions[partition] = fold
        self._schedule.forget(partition)

    def age(self, key: str, value: bytes) -> int | None:
        """Returns the stream time (ms) by which the table indexes a marker for expiry; None for other entries."""
        if not key.startswith(TASK):
            return None
        phase, since = phase_and_since(value)
        return None if phase is Phase.OPEN else since

    def give_up(self, lost: LostPartition) -> Effects:
        """Returns an outcome and an audit record for each sample that a loss leaves without one, and the state with
        every task closed."""
        account = LossAccount(lost.partition, self._limits.forget_ttl_ms)
        account.add_state(lost.entries)
        for record in lost.records:
            with suppress(DecodeError):  # such a record is a dead letter
                event = self._read(record.partition, record.offset, None if record.tombstone else record.value)
                account.add_record(event, SeenOn(record.offset, record.value), record.timestamp)
        effects = Effects(changes=account.state(lost.applied))
        for emission in account.given_up(lost.finished, lost.reason):
            outcome = emission.outcome
            effects.outputs.append(self._output(topics.OUTCOMES, outcome))
            seen = account.seen.get(outcome.head.task_id, SeenOn(0, b""))
            audit = AuditRecord(
                audit_id=derived_id("given-up", outcome.key),
                event_time=now_ms(),
                component=APP_ID,
                topic=topics.HALVES,
                partition=lost.partition,
                offset=seen.offset,
                record_type="Outcome",
                record_id=outcome.outcome_id,
                sha256=hashlib.sha256(seen.value).hexdigest(),
            )
            effects.outputs.append(self._output(topics.AUDIT, audit))
        return effects

    def revoke(self, partition: int) -> None:
        """Drops the partition from memory; its state is on the changelog."""
        self.partitions.pop(partition, None)
        self._schedule.forget(partition)

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds one batch; skips records at or before the partition's clock."""
        fold, effects = self.partitions[partition], Effects()
        async for record in in_turns(records):
            if record.offset <= fold.applied:
                continue
            self._emit(effects, fold.advance(record.offset, record.timestamp))
            # An unreadable record moves time as well: its append time does not depend on its content.
            try:
                event = self._decode(record)
                # Open tasks need no check: the record that opened them was on the right partition.
                if isinstance(event, Open | Score | Hint) and not fold.is_open(event.key):
                    check_place(record)
            except DecodeError as error:
                effects.dead.append(Dead.of(record, error.stage, error))
                continue
            except (InvalidRecord, Misplaced) as error:
                effects.dead.append(Dead.of(record, "validate", error))
                continue
            if tracing.enabled():
                self._traces.heard(event, record.headers)
            try:
                self._emit(effects, fold.apply(event, record.value))
            except InvalidRecord as error:
                effects.dead.append(Dead.of(record, "validate", error))
        effects.changes = fold.take_changes()
        self._schedule.folded(partition, fold.time)
        return effects

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns a clock record for each partition in which a wait is over now, or whose time has stood still (see
        `streams.fold.tick_schedule`). Its append time at the broker counts, not its event time."""
        folds = ((partition, self.partitions[partition]) for partition in partitions)
        due = [number for number, fold in folds if self._schedule.due(number, fold.time, fold.earliest_due)]
        ticks = [Tick(event_time=now_ms(), partition=partition) for partition in due]
        return [self._output(topics.HALVES, tick, tick.partition) for tick in ticks]

    def _read(self, partition: int, offset: int, raw: bytes | None) -> Record:
        return self._codec.decode(raw, topic=topics.HALVES, partition=partition, offset=offset, expected=self._expected)

    def _decode(self, record: LogRecord) -> Record:
        began = time.perf_counter()
        event = self._read(record.partition, record.offset, None if record.tombstone else record.value)
        self._codec.decode_seconds += time.perf_counter() - began
        if event.key != record.key:
            raise InvalidRecord(f"the key is {record.key!r}, but this {type(event).__name__} requires {event.key!r}")
        if len(record.value) > self._record_limit - KEPT_BYTES:
            # As a state value it would not fit on the changelog.
            raise InvalidRecord(
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
        record: Outcome | Rollout | Tick | AuditRecord,
        partition: int | None = None,
        traceparent: str | None = None,
    ) -> OutputRecord:
        headers = tuple(headers_of(record, APP_ID, traceparent))
        return OutputRecord(topic, record.key, self._codec.encode(topic, record), headers, partition)


def _too_large(outcome: Outcome, size: int, limit: int) -> Outcome:
    """Returns the outcome of a sample whose halves fit the record limit but whose rollout does not: there is no rollout
    to train on, and `not_trainable` gives the reason."""
    reason = f"the rollout takes {size:,} bytes; the limit is {limit:,} (record_limit_bytes in schemas/topics.yaml)"
    gone = {"rollout_id": None, "rollout_digest": None, "has_rl": False, "has_opd": False}
    return outcome.model_copy(update=gone | {"not_trainable": reason})
