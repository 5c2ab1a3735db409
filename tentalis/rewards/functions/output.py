"""The output of reward functions, bounded: what a function prints reaches the log, a flood is counted."""

from dataclasses import dataclass, field

MAX_SHOWN = 4_096
"""Bytes of output that are shown per call."""
MAX_LINE = 1_000


@dataclass(slots=True)
class BoundedOutput:
    """Splits output into lines, and drops what exceeds `limit` bytes per call. Pure."""

    limit: int = MAX_SHOWN
    dropped: int = 0
    _shown: int = 0
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that are complete."""
        room = max(0, self.limit - self._shown)
        kept = data[:room]
        self._shown += len(kept)
        self.dropped += len(data) - len(kept)
        self._rest += kept
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        shown = [_text(line) for line in lines if line.strip()]
        if len(self._rest) >= MAX_LINE or (self.dropped and self._rest):
            shown.append(_text(bytes(self._rest)))
            self._rest.clear()
        return shown

    def next_call(self) -> list[str]:
        """Begins the output of another call; returns the rest of the last one and the number of bytes dropped."""
        shown = [_text(bytes(self._rest))] if self._rest.strip() else []
        if self.dropped:
            shown.append(f"... and {self.dropped} more bytes, which are not shown")
        self._rest.clear()
        self.dropped = self._shown = 0
        return shown


def _text(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    shown = "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in text)
    return shown if len(shown) <= MAX_LINE else shown[: MAX_LINE - 1] + "…"
