"""Buffer of state changes for the changelog: their order after a batch, the time of deletions, and their recovery.

The state of a partition consists of payloads, headers and a clock. A *payload* is a record that waits, bytes as
received, under `<prefix><partition>/<offset>`: written once, under a key that is never reused. A *header* is the state
of one key of the log, which refers to its payloads by offset. The clock (`streams.fold.clock`) is written last.
"""

from collections.abc import Callable, Iterable, Mapping

from streams.fold.clock import CLOCK, PartitionClock, clock_key, encode_clock
from streams.runtime.processor import Change, DamagedState, stamped


class ChangelogBuffer:
    """The differences between a partition's state in memory and on the changelog.

    A key that becomes useless in a batch is deleted with the *next* batch: by then the headers and the clock that
    justify the deletion are on the changelog. So a crash never leaves a header without its payloads, or a redelivered
    record without the header that recognises it.

    Args:
        clock: the partition's clock.
        header, payload: prefixes of the state keys of headers and payloads.
    """

    def __init__(self, partition: int, clock: PartitionClock, *, header: str, payload: str) -> None:
        self._partition, self._clock, self._header, self._payload = partition, clock, header, payload
        self._flushed = clock.applied
        self._payloads: dict[int, bytes] = {}  # payloads that are not on the changelog yet, by offset
        self._values: dict[str, bytes] = {}  # other values that are not on the changelog yet
        self._changed: dict[str, None] = {}  # keys whose header is not on the changelog yet
        self._useless: dict[str, None] = {}  # state keys that this batch made useless
        self._doomed: dict[str, None] = {}  # state keys that the previous batch made useless
        self._unsettled: set[int] = set()  # payloads on the changelog from an interrupted batch
        self._again: list[int] = []  # unsettled payloads whose record was folded in this batch

    def payload_key(self, offset: int) -> str:
        """State key of a payload."""
        return f"{self._payload}{self._partition}/{offset}"

    # --- recovery ---------------------------------------------------------------------------------------------------

    def restore(
        self, entries: Iterable[tuple[str, bytes]], readers: Mapping[str, Callable[[str, bytes], None]], app: str
    ) -> dict[int, bytes]:
        """Takes over the changelog entries of a partition; returns the payloads among them by offset. Call it when the
        clock is restored. Every payload that belongs to no header must be given to `orphans`.

        Args:
            readers: functions for the other entries, by key prefix; each is called with the key without its prefix, and
                the value.
            app: the application, as named in errors.
        Raises:
            DamagedState: the entries cannot come from this application.
        """
        self._flushed = self._clock.applied
        payloads: dict[int, bytes] = {}
        for key, value in entries:
            prefix = key[: key.find("/") + 1]
            if prefix == self._payload:
                payloads[self._offset_of(key)] = value
            elif (read := readers.get(prefix)) is not None:
                read(key[len(prefix) :], value)
            elif prefix != CLOCK:
                raise DamagedState(f"unknown state key {key!r} in partition {self._partition} of the {app}")
        return payloads

    def missing(self, offset: int, holder: str, topic: str) -> DamagedState:
        """Returns the error for a payload that the changelog lost. `holder` names the header that refers to it."""
        return DamagedState(
            f"{holder} that is missing from the changelog (key {self.payload_key(offset)}): the changelog has lost "
            f"records. Delete it and reset the consumer group to the beginning of the {topic} topic to rebuild it"
        )

    def orphans(self, offsets: Iterable[int]) -> None:
        """Removes restored payloads that belong to no header. If the record of one will be read again, the payload
        waits for it: a deletion sent now could remove a successor's write to the same key."""
        for offset in offsets:
            if offset > self._clock.applied:
                self._unsettled.add(offset)
            else:
                self.doom(self.payload_key(offset))

    def doom(self, key: str) -> None:
        """Adds a state key that is already useless; the current batch deletes it."""
        self._doomed[key] = None

    @property
    def useless(self) -> frozenset[str]:
        """Restored state keys that belong to nothing: leftovers of the last batch."""
        return frozenset(self._doomed)

    # --- changes ----------------------------------------------------------------------------------------------------

    def folding(self, offset: int) -> None:
        """Marks the record at this offset as the one being folded."""
        if offset in self._unsettled:
            self._unsettled.discard(offset)
            self._again.append(offset)

    def keep_payload(self, offset: int, raw: bytes) -> None:
        """Adds a record that waits."""
        self._payloads[offset] = raw

    def drop_payload(self, offset: int) -> None:
        """Drops a payload to which no header refers any more."""
        if self._payloads.pop(offset, None) is None:
            self._useless[self.payload_key(offset)] = None

    def write(self, key: str, value: bytes) -> None:
        """Adds a value that is written once, or written again after it became useless."""
        self._values[key] = value
        self._wanted(key)

    def delete(self, key: str) -> None:
        """Drops a value that is no longer needed."""
        self._values.pop(key, None)
        self._useless[key] = None

    def header_changed(self, key: str) -> None:
        """Marks a header as changed."""
        self._changed[key] = None
        self._wanted(self._header + key)

    def header_expired(self, key: str) -> None:
        """Drops a header that is no longer remembered."""
        self._useless[self._header + key] = None

    def take(self, header: Callable[[str], bytes | None]) -> list[list[Change]]:
        """Returns the changes of the batch that ends here, in waves: payloads (and deletions), headers, clock; empty if
        no record was folded.

        `header` returns the value of a header, None if it expired within the batch.
        """
        if self._clock.applied == self._flushed:
            return []
        self._flushed = self._clock.applied
        for offset in self._again:
            if offset not in self._payloads:
                self._useless[self.payload_key(offset)] = None
        payloads: list[Change] = [(key, None) for key in self._doomed]
        payloads += [(self.payload_key(offset), stamped(offset, raw)) for offset, raw in self._payloads.items()]
        headers: list[Change] = [
            (self._header + key, value) for key in self._changed if (value := header(key)) is not None
        ]
        headers += self._values.items()
        clock: list[Change] = [(clock_key(self._partition), encode_clock(self._clock.applied, self._clock.time))]
        self._doomed, self._useless = self._useless, {}
        self._payloads, self._values, self._changed, self._again = {}, {}, {}, []
        return [wave for wave in (payloads, headers, clock) if wave]

    def _wanted(self, key: str) -> None:
        self._useless.pop(key, None)
        self._doomed.pop(key, None)

    def _offset_of(self, key: str) -> int:
        try:
            return int(key.rpartition("/")[2])
        except ValueError as error:
            raise DamagedState(f"state key {key!r} is not of the form {self._payload}<partition>/<offset>") from error
