"""Imports of large libraries, which are most of the start of a trainer or a model server."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Runs a block of imports without the garbage collector, which takes a fifth of the time of large ones and finds
    little: nearly all that a library creates when it is imported stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
