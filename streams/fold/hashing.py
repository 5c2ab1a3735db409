"""Short hashes that stand for ids in state keys and values."""

import hashlib

HASH_BYTES = 8


def short(*parts: object) -> bytes:
    """Returns an 8-byte hash of an id, given in parts."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=HASH_BYTES).digest()


def id_hash(name: str) -> int:
    """Returns a 64-bit hash of an id. The reader of a record found by it must compare the ids."""
    return int.from_bytes(
        hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=HASH_BYTES).digest(), "big"
    )
