"""What join_quix.py keeps in its store, and that state as it lies on its changelog.

Runs in both environments: imports nothing of Quix Streams.

- `task/<task_id>`: HEAD, then 28 bytes for each half that is in: event, sample, result, offset.
- `half/<offset>`: a half that waits, its bytes as they came.

In the store and on the changelog, every key is behind the prefix of the one state that all records of a partition
share. The changelog's records say their column family in a header.
"""

import hashlib
import struct

HALVES = "tentalis.halves.v1"
HEAD = struct.Struct(">BqqIB")  # phase (1 open, 2 closed), due, score came, samples, halves that are in
ENTRY_BYTES = 28
MARKER_TTL_MS = 24 * 3600 * 1000
PREFIX = b"all|"
HEADERS = [("__column_family__", b"default")]
OFFSETS = 2**40
"""The halves of written state came from here on: further on than a benchmark's log reaches."""


def entry_of(event_id: str, sample_index: int, result_id: str, offset: int) -> bytes:
    """A half that is in."""
    event = hashlib.blake2b(event_id.encode(), digest_size=8).digest()
    result = hashlib.blake2b(result_id.encode(), digest_size=8).digest()
    return event + sample_index.to_bytes(4, "big") + result + offset.to_bytes(8, "big")


def changelog_of(group: str) -> str:
    """Quix Streams' name for the changelog of the default store."""
    return f"changelog__{group}--{HALVES}--default"
