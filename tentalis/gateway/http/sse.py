"""Parses server-sent events from bytes in arbitrary pieces. Pure."""

# Bounds the memory taken by a line that never ends.
MAX_EVENT_BYTES = 64 * 2**20


class EventTooLong(ValueError):
    """An event over MAX_EVENT_BYTES bytes."""


class EventParser:
    """Takes bytes and returns the data of each complete event. Lines may end in LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of the events that this piece completes. Raises EventTooLong."""
        events: list[bytes] = []
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"the backend sent an event of over {MAX_EVENT_BYTES:,} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                self._end_event(events)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def close(self) -> list[bytes]:
        """Returns the data of a last event whose blank line is missing at the end of the stream."""
        events = self.feed(b"\n") if self._rest else []
        self._end_event(events)
        return events

    def _end_event(self, events: list[bytes]) -> None:
        if self._data:
            events.append(b"\n".join(self._data))
            self._data = []
