"""Keeps stdout for data: libraries print warnings there, which a reader of `-o json` must not get.

`reserve` covers the file descriptor for a whole process: C libraries, child processes, output at the exit. It leaves
`sys.stdout` to our own code. `libraries_to_stderr` covers Python code that prints or logs to `sys.stdout`; our own code
prints to `data` within it.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_data: TextIO | None = None


def reserve() -> None:
    """Points file descriptor 1 to stderr; `sys.stdout` then writes to a copy of the old one. A second call has no
    effect, nor has any call where `sys.stdout` was replaced, as tests do."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or not _uses_descriptor_1(stream):
        return
    stream.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    by_line = stream.line_buffering or stream.write_through
    encoding, errors = stream.encoding, stream.errors
    sys.stdout = os.fdopen(kept, "w", 1 if by_line else -1, encoding, errors)


def _uses_descriptor_1(stream: TextIO) -> bool:
    try:
        os.fstat(2)  # where it is closed, there is no stderr to point to
        return stream.fileno() == 1
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Within it, `sys.stdout` is stderr. A log handler that a library creates within it keeps stderr afterwards."""
    global _data
    before, _data = _data, data()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _data = before


def data() -> TextIO:
    """Returns the stream for data: stdout, also within `libraries_to_stderr`."""
    return sys.stdout if _data is None else _data
