"""A random order of any number of items that needs no memory: a Feistel network over the numbers of the items."""

import hashlib

ROUNDS = 6


def permuted(place: int, count: int, *key: str | int) -> int:
    """Returns the item at `place` of a random order of range(count): a bijection for each key, equal on all machines.

    The network permutes the next larger power of four; a number outside range(count) is permuted again until it is
    inside, which takes fewer than four turns on average.
    """
    if not 0 <= place < count:
        raise IndexError(f"place {place} is not in range({count})")
    if count == 1:
        return 0
    half = ((count - 1).bit_length() + 1) // 2
    prefix = "/".join(map(str, key))
    while True:
        place = _network(place, half, prefix)
        if place < count:
            return place


def _network(value: int, half: int, prefix: str) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        digest = hashlib.sha256(f"{prefix}/{number}/{right}".encode()).digest()
        left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
    return left << half | right
