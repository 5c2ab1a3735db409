"""Records a turn before its client gets the end of it: on the log, or on disk if the broker is too slow.

Turns on disk go to the log later, except those whose ids are on it already. So a turn that a client saw completed is on
the log exactly once, even if this process is killed at any moment.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import EPISODE_TURN, SessionEvent
from schemas.wire.codec import SchemasUnavailable
from tentalis.gateway.recording.event_log import AppendFailed, EventLog
from tentalis.gateway.recording.spool import RecordSpool, SpooledRecord
from tentalis.kafka.errors import Forbidden, NoSuchTopic, RecordTooLarge, Unreachable

log = logging.getLogger(__name__)

EPISODE_ACK_S = 30.0
"""Longest wait for the broker's acknowledgement of a turn of an episode, which never goes to disk."""
DRAIN_INTERVAL_S = 0.5
DRAIN_BATCH_RECORDS = 500
DRAIN_BATCH_BYTES = 32 * 2**20
DRAIN_TIMEOUT_S = 30.0


class NotRecorded(Exception):
    """A turn is neither on the log nor on disk: its client must not be told that it is complete."""


class TurnCounter(Protocol):
    """Counts turns by result: log, spool, lost, drained, set_aside."""

    def __call__(self, result: str, amount: int = 1) -> None:
        """Adds `amount` turns."""


class TurnRecorder:
    """Records session events. `ack_s`: longest wait for the broker's acknowledgement before the disk is used."""

    def __init__(self, event_log: EventLog, spool: RecordSpool, ack_s: float, count: TurnCounter) -> None:
        self._event_log, self._spool, self._ack_s, self._count = event_log, spool, ack_s, count
        # Ids that the producer still sends after their call stopped waiting, and ids that the drain has sent.
        self._late_ids: set[str] = set()
        self._draining_ids: set[str] = set()
        self._counted_aside = 0
        self._mutex = threading.Lock()

    @property
    def spooled(self) -> int:
        """Records on disk."""
        return len(self._spool)

    async def record(self, event: SessionEvent) -> None:
        """Returns once the event is on the log or on disk. A turn of an episode goes to the log alone: the worker joins
        the episode from what is on the log when the program has ended. Raises NotRecorded."""
        if event.turn_type == EPISODE_TURN:
            return await self._record_on_log(event)
        try:
            record = self._encode_fitting(self._event_log.encode, event)
        except SchemasUnavailable as error:
            log.debug("%s; the turn goes to the spool", error)
            await self._put_on_disk(self._encode_fitting(self._event_log.encode_for_disk, event))
            return
        # Keeps the order: while a turn of the same session is on disk, none overtakes it to the log.
        if not self._late_ids and not self._spool.has_key(record.key):
            try:
                future = self._event_log.send_async(record)
            except AppendFailed as error:
                log.warning("%s: the turn goes to the spool", error)
            else:
                if await self._wait_acknowledged(future):
                    self._count("log")
                    return
                with self._mutex:
                    self._late_ids.add(record.event_id)
                try:
                    await self._put_on_disk(record)
                finally:
                    future.add_done_callback(partial(self._on_late_acknowledgement, record.event_id))
                return
        await self._put_on_disk(record)

    async def _record_on_log(self, event: SessionEvent) -> None:
        try:
            record = self._encode_fitting(self._event_log.encode, event)
            await asyncio.wait_for(asyncio.shield(self._event_log.send_async(record)), EPISODE_ACK_S)
        except (AppendFailed, SchemasUnavailable, TimeoutError) as error:
            self._count("lost")
            reason = str(error) or f"the broker did not confirm it within {EPISODE_ACK_S:g} s"
            raise NotRecorded(f"a turn of an episode is not on the log: {reason}") from error
        self._count("log")

    async def drain(self) -> None:
        """Moves turns from disk to the log, until cancelled."""
        while True:
            if self.spooled:
                try:
                    await asyncio.to_thread(self.drain_once)
                except (KafkaException, NoSuchTopic, OSError, SchemasUnavailable, Forbidden, Unreachable) as error:
                    log.warning("%d turns stay in the spool for now: %s", self.spooled, error)
            await asyncio.sleep(DRAIN_INTERVAL_S)

    def drain_once(self) -> int:
        """Sends the turns on disk that are not already being sent to the log, until the broker stops taking them.
        Returns the number removed from disk. Searches the log once for all of them. Blocking.

        Raises KafkaException, NoSuchTopic, TimeoutError, SchemasUnavailable.
        """
        entries = {
            event_id: entry for event_id, entry in self._spool.entries().items() if not self._is_in_flight(event_id)
        }
        drained = 0
        try:
            for topic in {entry.topic for entry in entries.values()}:
                since = {event_id: entry.since for event_id, entry in entries.items() if entry.topic == topic}
                for event_id in self._event_log.ids_on_log(topic, min(since.values()), since.keys()):
                    self._spool.remove(event_id)
                    del entries[event_id]
                    drained += 1
            for batch in self._batches(entries):
                arrived = self._send_batch(batch)
                drained += arrived
                if arrived < len(batch):
                    break
        finally:
            if self._spool.set_aside_count > self._counted_aside:
                self._count("set_aside", self._spool.set_aside_count - self._counted_aside)
                self._counted_aside = self._spool.set_aside_count
            if drained:
                self._count("drained", drained)
                log.info("%d turns went from the spool to the log, %d are left", drained, self.spooled)
        return drained

    def _batches(self, event_ids: Iterable[str]) -> Iterator[list[SpooledRecord]]:
        """Yields the records for the log, in order, in batches of bounded count and size."""
        batch: list[SpooledRecord] = []
        size = 0
        for record in self._spool.records(event_ids):
            try:
                final = self._event_log.finalise(record)
            except LookupError as error:
                self._spool.set_aside(record.event_id, error)
                continue
            if batch and (len(batch) == DRAIN_BATCH_RECORDS or size + len(final.value) > DRAIN_BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(final)
            size += len(final.value)
        if batch:
            yield batch

    def _send_batch(self, records: list[SpooledRecord]) -> int:
        answered = threading.Semaphore(0)
        arrived: list[str] = []

        def on_done(event_id: str, result: KafkaError | RecordPlace) -> None:
            if isinstance(result, RecordPlace):
                self._spool.remove(event_id)
                arrived.append(event_id)
            with self._mutex:
                self._draining_ids.discard(event_id)
            answered.release()

        sent = 0
        for record in records:
            with self._mutex:
                self._draining_ids.add(record.event_id)
            try:
                self._event_log.send(record, partial(on_done, record.event_id))
            except AppendFailed:
                with self._mutex:
                    self._draining_ids.discard(record.event_id)
                break
            sent += 1
        for _ in range(sent):
            if not answered.acquire(timeout=DRAIN_TIMEOUT_S):
                break
        return len(arrived)

    def _is_in_flight(self, event_id: str) -> bool:
        return event_id in self._late_ids or event_id in self._draining_ids

    def _encode_fitting(
        self, encode: Callable[[str, SessionEvent], SpooledRecord], event: SessionEvent
    ) -> SpooledRecord:
        """Encodes an event, shortened if it exceeds the record limit. Raises SchemasUnavailable, NotRecorded."""
        try:
            return encode(topics.SESSIONS, event)
        except RecordTooLarge as error:
            log.warning("%s: it is recorded without its request", error)
            # An episode is joined from the tokens of its turns, which stay.
            reason = event.not_trainable or ("" if event.turn_type == EPISODE_TURN else "too large a record")
            shortened = event.model_copy(update={"request": "", "not_trainable": reason})
        try:
            return encode(topics.SESSIONS, shortened)
        except RecordTooLarge:
            shortened = shortened.model_copy(update={"messages": event.messages[-1:]})
        try:
            return encode(topics.SESSIONS, shortened)
        except RecordTooLarge as error:
            self._count("lost")
            raise NotRecorded(str(error)) from error

    async def _wait_acknowledged(self, future: "asyncio.Future[RecordPlace]") -> bool:
        try:
            await asyncio.wait_for(asyncio.shield(future), self._ack_s)
        except TimeoutError:
            log.warning("the broker did not confirm a turn within %g s: it goes to the spool", self._ack_s)
            return False
        except AppendFailed as error:
            log.warning("%s: it goes to the spool", error)
            return False
        return True

    async def _put_on_disk(self, record: SpooledRecord) -> None:
        try:
            await asyncio.to_thread(self._spool.put, record)
        except OSError as error:
            self._count("lost")
            raise NotRecorded(f"neither the broker nor the disk accepts the turn: {error}") from error
        self._count("spool")

    def _on_late_acknowledgement(self, event_id: str, future: "asyncio.Future[RecordPlace]") -> None:
        """Handles the broker's acknowledgement of a turn that is on disk because the acknowledgement came late."""
        if not future.cancelled() and future.exception() is None:
            self._spool.remove(event_id)
            self._count("drained")
        with self._mutex:
            self._late_ids.discard(event_id)
