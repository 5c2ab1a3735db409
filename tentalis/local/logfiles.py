"""Rotates the log files of the local stack while processes write to them, and reads their ends.

The processes write to their files directly, so that no line is lost or delayed when the supervisor dies or is busy. A
file that a process holds open cannot be replaced, so a full file is copied to `NAME.log.1` and truncated. Lines written
between the two steps are lost; a file that cannot be copied stays as it is.
"""

import os
import shutil
from collections import deque
from pathlib import Path

LIMIT = 10 * 2**20
_END_BYTES = 16_384
_TAIL_LINES = 15
START = "--- "
"""The beginning of the line that the supervisor writes at each start of a process: the time and the command follow."""


def turn_over(folder: Path) -> tuple[list[Path], str]:
    """Rotates every `*.log` above LIMIT bytes. Returns the rotated files, and a message about failures or ""."""
    turned: list[Path] = []
    troubles: list[str] = []
    for file in sorted(folder.glob("*.log")):
        try:
            if file.stat().st_size > LIMIT:
                _turn_over(file)
                turned.append(file)
        except OSError as error:  # without room for the copy, the file can hardly grow either
            troubles.append(f"cannot rotate {file}: {error}")
    return turned, "; ".join(troubles)


def _turn_over(file: Path) -> None:
    copy = file.with_name(f"{file.name}.tmp")
    try:
        shutil.copyfile(file, copy)
        copy.replace(file.with_name(f"{file.name}.1"))
    finally:
        copy.unlink(missing_ok=True)
    os.truncate(file, 0)


def end_of(file: Path, start: int = 0) -> str:
    """Returns the end of a log, from `start` on at most, or a note if it cannot be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(start, file.stat().st_size - _END_BYTES))
            return opened.read().decode(errors="replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"


def tail(file: Path) -> str:
    """Returns the last lines of a log."""
    return "\n".join(deque(end_of(file).splitlines(), maxlen=_TAIL_LINES))


def last_words(file: Path, start: int) -> str:
    """Returns the log line in which a process reported why it ended, else its last line."""
    lines = [line.strip() for line in end_of(file, start).splitlines() if line.strip() and not line.startswith(START)]
    told = [line for line in lines if line.startswith("error: ") or " CRITICAL " in line]
    return (told or lines or ["its log is empty"])[-1].rstrip(".")
