"""A turn is written down before its client hears the end of it: on the log, or, where the broker is too slow, on disk.

What is on disk goes to the log later, by id: what lies there already is not sent again. So what a client saw completed
is on the log once, also if this process is killed at any moment.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException

from schemas import topics
from schemas.codec import SchemasUnavailable
from schemas.place import Place
from schemas.records import SessionEvent
from tentalis.gateway.eventlog import EventLog, NotDelivered
from tentalis.gateway.spool import Spool, Spooled
from tentalis.kafka import NoSuchTopic, RecordTooLarge
from tentalis.refusal import Forbidden, Unreachable

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 0.5
DRAIN_AT_ONCE = 500
DRAIN_BYTES = 32 * 2**20
DRAIN_PATIENCE_S = 30.0


class NotRecorded(Exception):
    """A turn is neither on the log nor on disk: its client must not hear that it is complete."""


class Counter(Protocol):
    """Counts what became of turns: log, spool, lost, drained, set_aside."""

    def __call__(self, became: str, amount: int = 1) -> None:
        """One more, or several."""


class Recorder:
    """Writes session events down. `ack_s`: how long the broker may take before the disk is used."""

    def __init__(self, events: EventLog, spool: Spool, ack_s: float, count: Counter) -> None:
        self._events, self._spool, self._ack_s, self._count = events, spool, ack_s, count
        # Ids in the hands of the producer that nobody waits for any more, and those that the drain has sent.
        self._late: set[str] = set()
        self._sending: set[str] = set()
        self._aside = 0
        self._mutex = threading.Lock()

    @property
    def spooled(self) -> int:
        """Records on disk."""
        return len(self._spool)

    async def record(self, event: SessionEvent) -> None:
        """Returns once the event is on the log or on disk. Raises NotRecorded."""
        try:
            record = self._fitting(self._events.prepared, event)
        except SchemasUnavailable as error:
            log.debug("%s; the turn goes to the spool", error)
            await self._put(self._fitting(self._events.set_down, event))
            return
        # Behind a turn of the same session that is on disk, none goes ahead of it to the log.
        if not self._late and not self._spool.holds(record.key):
            try:
                future = self._events.sent(record)
            except NotDelivered as error:
                log.warning("%s: the turn goes to the spool", error)
            else:
                if await self._acknowledged(future):
                    self._count("log")
                    return
                with self._mutex:
                    self._late.add(record.event_id)
                try:
                    await self._put(record)
                finally:
                    future.add_done_callback(partial(self._settled, record.event_id))
                return
        await self._put(record)

    async def drain(self) -> None:
        """Brings to the log what is on disk, until cancelled."""
        while True:
            if self.spooled:
                try:
                    await asyncio.to_thread(self.drain_once)
                except (KafkaException, NoSuchTopic, OSError, SchemasUnavailable, Forbidden, Unreachable) as error:
                    log.warning("%d turns stay in the spool for now: %s", self.spooled, error)
            await asyncio.sleep(DRAIN_EVERY_S)

    def drain_once(self) -> int:
        """Sends what is on disk and on no other way to the log, until the broker does not take it; how many it could
        let go. The log is looked through once for all of it. Blocking.

        Raises KafkaException, NoSuchTopic, TimeoutError, SchemasUnavailable.
        """
        held = {event_id: each for event_id, each in self._spool.held().items() if not self._busy(event_id)}
        gone = 0
        try:
            for topic in {each.topic for each in held.values()}:
                since = {event_id: each.since for event_id, each in held.items() if each.topic == topic}
                for event_id in self._events.present(topic, min(since.values()), since.keys()):
                    self._spool.remove(event_id)
                    del held[event_id]
                    gone += 1
            for batch in self._batches(held):
                arrived = self._sent(batch)
                gone += arrived
                if arrived < len(batch):
                    break
        finally:
            if self._spool.aside > self._aside:
                self._count("set_aside", self._spool.aside - self._aside)
                self._aside = self._spool.aside
            if gone:
                self._count("drained", gone)
                log.info("%d turns went from the spool to the log, %d are left", gone, self.spooled)
        return gone

    def _batches(self, event_ids: Iterable[str]) -> Iterator[list[Spooled]]:
        """The records as they go to the log, in their order, as many at a time as fit into memory."""
        batch: list[Spooled] = []
        size = 0
        for record in self._spool.records(event_ids):
            try:
                final = self._events.final(record)
            except LookupError as error:
                self._spool.set_aside(record.event_id, error)
                continue
            if batch and (len(batch) == DRAIN_AT_ONCE or size + len(final.value) > DRAIN_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(final)
            size += len(final.value)
        if batch:
            yield batch

    def _sent(self, records: list[Spooled]) -> int:
        left = threading.Semaphore(0)
        arrived: list[str] = []

        def done(event_id: str, became: KafkaError | Place) -> None:
            if isinstance(became, Place):
                self._spool.remove(event_id)
                arrived.append(event_id)
            with self._mutex:
                self._sending.discard(event_id)
            left.release()

        sent = 0
        for record in records:
            with self._mutex:
                self._sending.add(record.event_id)
            try:
                self._events.send(record, partial(done, record.event_id))
            except NotDelivered:
                with self._mutex:
                    self._sending.discard(record.event_id)
                break
            sent += 1
        for _ in range(sent):
            if not left.acquire(timeout=DRAIN_PATIENCE_S):
                break
        return len(arrived)

    def _busy(self, event_id: str) -> bool:
        return event_id in self._late or event_id in self._sending

    def _fitting(self, made: Callable[[str, SessionEvent], Spooled], event: SessionEvent) -> Spooled:
        """As much of an event as a record may hold. Raises SchemasUnavailable, NotRecorded."""
        try:
            return made(topics.SESSIONS, event)
        except RecordTooLarge as error:
            log.warning("%s: it is recorded without its request", error)
            short = event.model_copy(
                update={"request": "", "not_trainable": event.not_trainable or "too large a record"}
            )
        try:
            return made(topics.SESSIONS, short)
        except RecordTooLarge:
            short = short.model_copy(update={"messages": event.messages[-1:]})
        try:
            return made(topics.SESSIONS, short)
        except RecordTooLarge as error:
            self._count("lost")
            raise NotRecorded(str(error)) from error

    async def _acknowledged(self, future: "asyncio.Future[Place]") -> bool:
        try:
            await asyncio.wait_for(asyncio.shield(future), self._ack_s)
        except TimeoutError:
            log.warning("the broker did not confirm a turn within %g s: it goes to the spool", self._ack_s)
            return False
        except NotDelivered as error:
            log.warning("%s: it goes to the spool", error)
            return False
        return True

    async def _put(self, record: Spooled) -> None:
        try:
            await asyncio.to_thread(self._spool.put, record)
        except OSError as error:
            self._count("lost")
            raise NotRecorded(f"neither the broker nor the disk takes the turn: {error}") from error
        self._count("spool")

    def _settled(self, event_id: str, future: "asyncio.Future[Place]") -> None:
        """What the broker said of a turn after nobody waited any more."""
        if not future.cancelled() and future.exception() is None:
            self._spool.remove(event_id)
            self._count("drained")
        with self._mutex:
            self._late.discard(event_id)
