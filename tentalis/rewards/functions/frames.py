"""Messages between scoring and the process of a reward function: length, then bytes."""

import os
import select
import struct
import time

_LENGTH = struct.Struct(">Q")
MAX_REPLY = 1 << 20
"""The longest reply of a function's process, in bytes."""


class BadFrame(Exception):
    """A message that this program did not write."""


def write(fd: int, data: bytes, deadline: float | None = None) -> None:
    """Writes a message.

    Args:
        deadline: of `time.monotonic`; the descriptor must then not block.

    Raises:
        TimeoutError: the deadline has passed.
        BrokenPipeError: the reader has ended.
    """
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        if deadline is not None:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
                raise TimeoutError("the process does not read its calls")
        try:
            rest = rest[os.write(fd, rest[:65536]) :]
        except BlockingIOError:
            continue


def read(fd: int, limit: int | None = None) -> bytes | None:
    """Returns the next message, None at the end of the stream. Raises BadFrame if it is longer than `limit`."""
    head = _exactly(fd, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if limit is not None and length > limit:
        raise BadFrame(f"a message of {length} bytes")
    return _exactly(fd, length)


def _exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
