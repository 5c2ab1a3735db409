"""What has to be written to the changelog after a batch, in which order, and what may be deleted when."""

from collections.abc import Callable

from streams.join.state import CLOCK, HALF, TASK, encode_clock
from streams.processor import Change, stamped


class Ledger:
    """The differences between a partition's state in memory and on the changelog.

    What became useless in a batch is deleted with the *next* one: by then the headers and the clock that say so are on
    the changelog, so a crash never finds a waiting task without its halves, or a redelivered half without its marker.

    Args:
        header, half: what the keys begin with of headers, and of the records that they name by their offsets. Said in
            the words of the join; a session is a task, and the turn that it waits with a half.
    """

    def __init__(self, partition: int, header: str = TASK, half: str = HALF) -> None:
        self._partition, self._header, self._half = partition, header, half
        self._fresh: dict[int, bytes] = {}  # halves that are not on the changelog yet: offset -> bytes as they came
        self._notes: dict[str, bytes] = {}  # other values that are not there yet
        self._dirty: dict[str, None] = {}  # tasks whose header is not on the changelog yet
        self._useless: dict[str, None] = {}  # keys that this batch made useless
        self._doomed: dict[str, None] = {}  # those of the batch before
        self._unsettled: set[int] = set()  # halves on the changelog from a batch that a crash cut off
        self._again: list[int] = []  # those of them whose record was folded again in this batch

    def half_key(self, offset: int) -> str:
        """State key of a half."""
        return f"{self._half}{self._partition}/{offset}"

    def doom(self, key: str) -> None:
        """A key of the changelog that is useless already."""
        self._doomed[key] = None

    def unsettle(self, offset: int) -> None:
        """A half that a crash left behind, whose record comes again."""
        self._unsettled.add(offset)

    def folding(self, offset: int) -> None:
        """The record at this offset is folded now."""
        if offset in self._unsettled:
            self._unsettled.discard(offset)
            self._again.append(offset)

    def keep_half(self, offset: int, raw: bytes) -> None:
        """A half that waits for others."""
        self._fresh[offset] = raw

    def drop_half(self, offset: int) -> None:
        """A half that nobody waits with any more."""
        if self._fresh.pop(offset, None) is None:
            self._useless[self.half_key(offset)] = None

    def note(self, key: str, value: bytes) -> None:
        """A value that is written once, or again when it had become useless."""
        self._notes[key] = value
        self._wanted(key)

    def useless(self, key: str) -> None:
        """A value that nobody needs any more."""
        self._notes.pop(key, None)
        self._useless[key] = None

    def changed(self, task_id: str) -> None:
        """The header of a task is another."""
        self._dirty[task_id] = None
        self._wanted(self._header + task_id)

    def expired(self, task_id: str) -> None:
        """A task is not remembered any more."""
        self._useless[self._header + task_id] = None

    def waves(self, header: Callable[[str], bytes | None], applied: int, time: int) -> list[list[Change]]:
        """The changes of the batch that ends here: halves (and deletions), headers, clock.

        `header` gives a task's value, None if it expired within the batch.
        """
        for offset in self._again:
            if offset not in self._fresh:
                self._useless[self.half_key(offset)] = None
        halves: list[Change] = [(key, None) for key in self._doomed]
        halves += [(self.half_key(offset), stamped(offset, raw)) for offset, raw in self._fresh.items()]
        headers: list[Change] = [
            (self._header + task_id, value) for task_id in self._dirty if (value := header(task_id)) is not None
        ]
        headers += self._notes.items()
        clock: list[Change] = [(f"{CLOCK}{self._partition}", encode_clock(applied, time))]
        self._doomed, self._useless = self._useless, {}
        self._fresh, self._notes, self._dirty, self._again = {}, {}, {}, []
        return [wave for wave in (halves, headers, clock) if wave]

    def _wanted(self, key: str) -> None:
        self._useless.pop(key, None)
        self._doomed.pop(key, None)
