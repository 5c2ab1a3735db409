"""Server-sent events out of bytes that come in any pieces. Pure."""

# A line that never ends must not fill the memory.
LONGEST_EVENT = 64 * 2**20


class TooLong(ValueError):
    """An event over LONGEST_EVENT bytes."""


class Events:
    """Feeds on bytes, gives the data of each event that is complete. Lines may end in LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises TooLong."""
        found: list[bytes] = []
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST_EVENT:
            raise TooLong(f"the backend sent an event of over {LONGEST_EVENT:,} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                self._end(found)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return found

    def close(self) -> list[bytes]:
        """What was said when the stream ended, where its last blank line is missing."""
        found = self.feed(b"\n") if self._rest else []
        self._end(found)
        return found

    def _end(self, found: list[bytes]) -> None:
        if self._data:
            found.append(b"\n".join(self._data))
            self._data = []
