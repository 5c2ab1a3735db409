"""The sessions as a stream application: decodes events, folds them, and encodes tasks, results and feedback."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.records import Feedback, Record, Result, Task, Tick
from schemas.wire.codec import Codec, DecodeError
from streams.apps.sessions import metrics
from streams.apps.sessions.core import SessionCounts, SessionLimits, SessionsPartition
from streams.fold.admission_control import AdmissionControl, OpenBound, PartitionLoad
from streams.fold.clock import BEGINNING
from streams.fold.partition import InvalidRecord
from streams.runtime.decoding import dead, output
from streams.runtime.metrics import STREAM_DECODE_SECONDS
from streams.runtime.processor import Dead, Effects, LogRecord, OutputRecord
from tentalis.kafka import topology
from tentalis.service import tracing
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings
from tentalis.signals import NAMES
from tentalis.text.timestamps import now_ms

APP_ID = topology.named("sessions").app_id
TOPIC_OF: dict[type[Record], str] = {Task: topics.TASKS, Result: topics.RESULTS, Feedback: topics.FEEDBACK}
TICK_EVERY_S = 5.0
MOST_REASONS = 32
"""The most reasons that the metric of turns without a task distinguishes: reasons come from clients, without bound."""


class SessionsProcessor:
    """The `streams.runtime.processor.Processor` of the sessions. Owns the dead-letter topic of the session events.

    Args:
        codec: reads events, writes tasks, results and feedback.
        limits: when a session ends, and how long its state is remembered.
        bound: how much may be open before the input is paused.
    """

    app_id = APP_ID
    topics: tuple[str, ...] = (topics.SESSIONS,)
    table: str | None = "state"

    def __init__(self, codec: Codec, limits: SessionLimits | None = None, bound: OpenBound | None = None) -> None:
        self.partitions: dict[int, SessionsPartition] = {}
        self._codec = codec
        self._limits = limits or SessionLimits()
        self._admission = AdmissionControl(bound or OpenBound(), self._loads, "sessions")
        self._expected = topics.table().records_of(topics.SESSIONS)
        self._tally = SessionCounts()
        self._ticked_at = 0.0

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the sessions."""
        folds, tally = self.partitions, self._tally
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.SESSIONS_OPEN, lambda: sum(fold.open_sessions for fold in folds.values()))
        exporter.read(metrics.SESSIONS_REMEMBERED, lambda: sum(fold.remembered for fold in folds.values()))
        exporter.read(metrics.SESSIONS_OPEN_BYTES, lambda: sum(fold.open_bytes for fold in folds.values()))
        exporter.read(metrics.SESSIONS_PAUSED, self._admission.paused)
        exporter.read(
            metrics.SESSIONS_TIME,
            lambda: {(str(p),): fold.time / 1000 for p, fold in folds.items() if fold.time > BEGINNING},
        )
        exporter.read(metrics.SESSIONS_TURNS, lambda: _labelled(tally.turns))
        exporter.read(metrics.SESSIONS_NOT_TRAINABLE, lambda: _labelled(_few(tally.not_trainable)))
        exporter.read(metrics.SESSIONS_NEXT_STATES, lambda: _labelled(tally.next_states))
        exporter.read(metrics.SESSIONS_SIGNALS, lambda: _labelled(tally.signals))
        exporter.read(metrics.SESSIONS_ENDED, lambda: _labelled(tally.ended))
        exporter.read(metrics.SESSIONS_DUPLICATES, lambda: tally.duplicates)
        exporter.read(metrics.SESSIONS_LATE, lambda: tally.late)
        exporter.read(metrics.SESSIONS_FORGOTTEN, lambda: tally.forgotten)

    def waits(self, partition: int) -> bool:
        """Returns true if a partition is paused because too much is open (see `streams.fold.admission_control`)."""
        return self._admission.waits(partition)

    def full(self) -> str | None:
        """Returns the reason why all partitions are paused; None if any is read."""
        return self._admission.full()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores a partition. Raises DamagedState if the entries cannot come from the sessions."""
        fold = SessionsPartition(partition, partial(self._read, partition), self._limits, self._tally)
        fold.restore(entries)
        self.partitions[partition] = fold

    def revoke(self, partition: int) -> None:
        """Drops the partition from memory; its state is on the changelog."""
        self.partitions.pop(partition, None)

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds one batch; skips records at or before the partition's clock."""
        fold, effects = self.partitions[partition], Effects()
        for record in records:
            if record.offset <= fold.applied:
                continue
            self._emit(effects, fold.advance(record.offset, record.timestamp), None)
            # An unreadable record moves time as well: its append time does not depend on its content.
            try:
                event = self._decode(record)
                made = fold.apply(event, record.value)
            except DecodeError as error:
                effects.dead.append(dead(record, error))
            except InvalidRecord as error:
                effects.dead.append(Dead.of(record, "validate", error))
            else:
                self._emit(effects, made, record)
        effects.changes = fold.take_changes()
        return effects

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns a clock record for each owned partition, every TICK_EVERY_S, so that sessions end where no other
        record comes. Its append time at the broker counts, not its event time."""
        now = time.monotonic()
        if now - self._ticked_at < TICK_EVERY_S:
            return ()
        self._ticked_at = now
        ticks = [Tick(event_time=now_ms(), partition=partition) for partition in partitions]
        return [output(self._codec, topics.SESSIONS, tick, APP_ID)._replace(partition=tick.partition) for tick in ticks]

    def _read(self, partition: int, offset: int, raw: bytes | None) -> Record:
        return self._codec.decode(
            raw, topic=topics.SESSIONS, partition=partition, offset=offset, expected=self._expected
        )

    def _decode(self, record: LogRecord) -> Record:
        began = time.perf_counter()
        event = self._read(record.partition, record.offset, None if record.tombstone else record.value)
        self._codec.decode_seconds += time.perf_counter() - began
        # A Forget is sent to every partition, whatever its key; the key of a tick belongs to its partition.
        if event.key != record.key:
            raise InvalidRecord(f"the key is {record.key!r}, but this {type(event).__name__} requires {event.key!r}")
        return event

    def _emit(self, effects: Effects, made: Sequence[Record], cause: LogRecord | None) -> None:
        for record in made:
            # A turn continues the trace of its request. Its feedback comes from another request, so another trace.
            headers = () if cause is None or isinstance(record, Feedback) else cause.headers
            parent = tracing.continued(headers, record.key)
            with tracing.span("session", parent=parent) as span:
                topic = TOPIC_OF[type(record)]
                effects.outputs.append(output(self._codec, topic, record, APP_ID, span.traceparent))

    def _loads(self) -> dict[int, PartitionLoad]:
        return {p: PartitionLoad(fold.open_sessions, fold.open_bytes, fold.time) for p, fold in self.partitions.items()}


def build(
    settings: Settings, *, idle_ms: int, signals: frozenset[str] = NAMES, bound: OpenBound | None = None
) -> SessionsProcessor:
    """Builds the application of a process."""
    from tentalis.kafka.codec import make_codec

    return SessionsProcessor(make_codec(settings, patience=0.0), SessionLimits(signals=signals, idle_ms=idle_ms), bound)


def _labelled(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _few(counts: Mapping[str, int]) -> dict[str, int]:
    """Keeps the first MOST_REASONS reasons and adds up the others."""
    found: dict[str, int] = {}
    for reason, count in counts.items():
        name = reason if len(found) < MOST_REASONS else "other"
        found[name] = found.get(name, 0) + count
    return found
