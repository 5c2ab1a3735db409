"""The sessions as a stream application: decodes events, folds them, encodes what comes out."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Feedback, Record, Result, Task, Tick
from streams.intake import dead, output
from streams.join.room import Bound, Load, Room
from streams.processor import Dead, Effects, LogRecord, Output
from streams.sessions.core import BEGINNING, Limits, Partition, Refused, Tally
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.kafka import now_ms
from tentalis.metrics import Exporter
from tentalis.signals import NAMES

APP_ID = "tentalis-sessions"
TOPIC_OF: dict[type[Record], str] = {Task: topics.TASKS, Result: topics.RESULTS, Feedback: topics.FEEDBACK}
TICK_EVERY_S = 5.0
MOST_REASONS = 32
"""Different reasons that the metric of turns without a task tells apart: they come from outside."""


class SessionsProcessor:
    """`streams.processor.Processor` of the sessions. Owns the dead-letter topic of the session events.

    Args:
        codec: reads events, writes tasks, results and feedback.
        limits: when a session ends, how long what is remembered.
        bound: how much may be open before the input waits.
    """

    app_id = APP_ID
    topics: tuple[str, ...] = (topics.SESSIONS,)
    table: str | None = "state"

    def __init__(self, codec: Codec, limits: Limits | None = None, bound: Bound | None = None) -> None:
        self.partitions: dict[int, Partition] = {}
        self._codec = codec
        self._limits = limits or Limits()
        self._room = Room(bound or Bound(), self._loads, "sessions")
        self._expected = topics.table().records_of(topics.SESSIONS)
        self._tally = Tally()
        self._ticked_at = 0.0

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics."""
        folds, tally = self.partitions, self._tally
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.SESSIONS_OPEN, lambda: sum(fold.open_sessions for fold in folds.values()))
        exporter.read(metrics.SESSIONS_REMEMBERED, lambda: sum(fold.remembered for fold in folds.values()))
        exporter.read(metrics.SESSIONS_OPEN_BYTES, lambda: sum(fold.open_bytes for fold in folds.values()))
        exporter.read(metrics.SESSIONS_PAUSED, self._room.paused)
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
        """Whether a partition is not read on, because too much is open (see `streams.join.room`)."""
        return self._room.waits(partition)

    def full(self) -> str | None:
        """Why nothing is read on; None if something is."""
        return self._room.full()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Raises StateError if the entries cannot come from here."""
        fold = Partition(partition, partial(self._read, partition), self._limits, self._tally)
        fold.restore(entries)
        self.partitions[partition] = fold

    def revoke(self, partition: int) -> None:
        """Forgets the partition; its state is on the changelog."""
        self.partitions.pop(partition, None)

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds one batch; records at or before the partition's clock are passed over."""
        fold, effects = self.partitions[partition], Effects()
        for record in records:
            if record.offset <= fold.applied:
                continue
            self._emit(effects, fold.advance(record.offset, record.timestamp), None)
            # What is unreadable moves time all the same: when it was appended does not depend on what it holds.
            try:
                event = self._decode(record)
                made = fold.apply(event, record.value)
            except DecodeError as error:
                effects.dead.append(dead(record, error))
            except Refused as error:
                effects.dead.append(Dead.of(record, "validate", error))
            else:
                self._emit(effects, made, record)
        effects.changes = fold.take_changes()
        return effects

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Now and then the clock of each owned partition, so that sessions end where nothing else comes. What counts is
        when the broker appends it, not its event time."""
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
        # Forget goes to every partition, whatever its key would say; a tick's key is its partition's.
        if event.key != record.key:
            raise Refused(f"the key is {record.key!r}, but this {type(event).__name__} belongs under {event.key!r}")
        return event

    def _emit(self, effects: Effects, made: Sequence[Record], cause: LogRecord | None) -> None:
        for record in made:
            # The turn goes on with the trace of its request. What comes next is another request, so another trace.
            headers = () if cause is None or isinstance(record, Feedback) else cause.headers
            parent = tracing.continued(headers, record.key)
            with tracing.span("session", parent=parent) as span:
                topic = TOPIC_OF[type(record)]
                effects.outputs.append(output(self._codec, topic, record, APP_ID, span.traceparent))

    def _loads(self) -> dict[int, Load]:
        return {p: Load(fold.open_sessions, fold.open_bytes, fold.time) for p, fold in self.partitions.items()}


def build(
    settings: Settings, *, idle_ms: int, signals: frozenset[str] = NAMES, bound: Bound | None = None
) -> SessionsProcessor:
    """The application for a process."""
    from tentalis.kafka import make_codec

    return SessionsProcessor(make_codec(settings, patience=0.0), Limits(signals=signals, idle_ms=idle_ms), bound)


def _labelled(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _few(counts: Mapping[str, int]) -> dict[str, int]:
    """The first reasons that came, and the others together."""
    found: dict[str, int] = {}
    for reason, count in counts.items():
        name = reason if len(found) < MOST_REASONS else "other"
        found[name] = found.get(name, 0) + count
    return found
