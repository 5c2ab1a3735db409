"""The state format of join_quix.py, in its store and on its changelog.

Runs in both environments: does not import Quix Streams.

- `task/<task_id>`: HEAD, then 28 bytes for each half that has arrived: event, sample, result, offset.
- `half/<offset>`: the unchanged bytes of a waiting half.

In the store and on the changelog, every key has the prefix of the one state that all records of a partition share. A
header of each changelog record names its column family.
"""

import hashlib
import struct

HALVES = "tentalis.halves.v1"
HEAD = struct.Struct(">BqqIB")  # phase (1 open, 2 closed), due, time of the score, samples, halves that have arrived
ENTRY_BYTES = 28
MARKER_TTL_MS = 24 * 3600 * 1000
PREFIX = b"all|"
HEADERS = [("__column_family__", b"default")]
OFFSETS = 2**40
"""First offset of the halves in written state: beyond the end of a benchmark's log."""


def entry_of(event_id: str, sample_index: int, result_id: str, offset: int) -> bytes:
    """The entry of a half that has arrived."""
    event = hashlib.blake2b(event_id.encode(), digest_size=8).digest()
    result = hashlib.blake2b(result_id.encode(), digest_size=8).digest()
    return event + sample_index.to_bytes(4, "big") + result + offset.to_bytes(8, "big")


def changelog_of(group: str) -> str:
    """Quix Streams' name for the changelog of the default store."""
    return f"changelog__{group}--{HALVES}--default"
