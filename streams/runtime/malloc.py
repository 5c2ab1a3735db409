"""Makes glibc return memory that RocksDB has freed to the system.

RocksDB's write buffers are blocks of 1 MiB, freed by the dozen with every flush. glibc maps blocks above a threshold
separately and unmaps them when they are freed, but then raises the threshold to the size of the freed block: after the
first flush the buffers are allocated on the heap, and the holes that they leave stay. A threshold that is set
explicitly is not raised.
"""

import ctypes
import os

M_MMAP_THRESHOLD = -3
THRESHOLD = 256 * 2**10


def give_back_large_blocks() -> bool:
    """Sets the threshold; returns True if it was set. It is not set in a C library other than glibc, nor if the
    environment has its own settings for glibc's malloc."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, THRESHOLD) == 1
