"""Lets memory go back to the system that RocksDB is done with.

Its write buffers are blocks of 1 MiB, freed by the dozen with every flush. glibc puts blocks above a threshold into
mappings of their own, which go back when they are freed, but raises the threshold to the size of whatever was freed so:
after the first flush the buffers lie on the heap, and the holes that they leave stay. A threshold that was set stays.
"""

import ctypes
import os

M_MMAP_THRESHOLD = -3
THRESHOLD = 256 * 2**10


def give_back_large_blocks() -> bool:
    """Whether the C library could be told: one that is not glibc has no such setting, and an environment that has
    settings of its own for glibc's malloc is left alone."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, THRESHOLD) == 1
