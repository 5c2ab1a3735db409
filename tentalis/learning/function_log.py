"""Shows what the user's functions print and how they fail, which the processes that call them write to their logs.

Only the lines of `tentalis.rewards.functions` count: other warnings of these processes, and their tracebacks, are left
out. The scorer logs a failure once for each line of the user's file, and then counts.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

from tentalis.local.log_reading import LogFile

PROCESSES = ("scoring", "manager")
"""The processes that call reward functions and hint functions."""
PRINTED_LINES = 20
"""Lines of prints that are shown in PERIOD_S; further ones are counted."""
PERIOD_S = 10.0
TRACEBACKS = 5
"""Failures of a process that are shown with their traceback; of further ones only the first line."""
_HEAD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (?P<logger>[\w.]+): (?P<message>.*)")
_FAILURES = "tentalis.rewards.functions.scorer"
_PRINTS = "tentalis.rewards.functions.output"


class FunctionLines:
    """Picks the lines to show from one process's log. Pure but for the clock.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._printed = self._left_out = self._tracebacks = 0
        self._begins = self._within = False

    def pick(self, line: str) -> str | None:
        """Returns the text to show for the next line of the log, or None."""
        head = _HEAD.match(line)
        if head is None:
            if self._begins:
                self._tracebacks += 1
                self._begins, self._within = False, self._tracebacks <= TRACEBACKS
            return f"  {line}" if self._within else None
        self._begins = self._within = False
        if head["logger"] == _PRINTS:
            self._printed += 1
            self._left_out += self._printed > PRINTED_LINES
            return head["message"] if self._printed <= PRINTED_LINES else None
        if head["logger"] != _FAILURES:
            return None
        self._begins = True  # if a traceback follows: counts of earlier failures have none
        return head["message"]

    def left_out(self) -> int:
        """Returns the number of printed lines that were left out, once PERIOD_S is over; begins another period."""
        if self._clock() - self._begun < PERIOD_S:
            return 0
        count, self._left_out, self._printed, self._begun = self._left_out, 0, 0, self._clock()
        return count


class FunctionLog:
    """Follows the logs of a stack in a folder, from their present ends on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: LogFile(name, folder / f"{name}.log") for name in PROCESSES}
        self._lines = {name: FunctionLines() for name in PROCESSES}
        self._named: set[str] = set()
        for file in self._files.values():
            file.skip_past()

    def new(self) -> list[str]:
        """Returns the new lines to show. The first of a process are followed by the place of its log."""
        found: list[str] = []
        for name, file in self._files.items():
            lines = self._lines[name]
            shown = [text for line in file.new() if (text := lines.pick(line.text)) is not None]
            if count := lines.left_out():
                shown.append(f"... and {count} more printed lines")
            if shown and name not in self._named:
                self._named.add(name)
                shown.append(f"`tentalis logs {name}` has all of it: {self._folder / name}.log")
            found += shown
        return found
