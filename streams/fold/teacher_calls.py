"""Calls to the teacher, as hinting and experience make them: how many at the same time, and which failures pass."""

from streams.runtime.processor import Retryable
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable

AT_ONCE = 32
"""The most calls to the teacher in flight, over all partitions: as many as the server can batch. Also the most judge
calls."""
LATER = frozenset({401, 403, 404, 408, 409, 425, 429, 502, 504})
"""Refusals that concern the server's state or configuration, not a record: the batch waits, and the worker reports
it."""


def refused_for_good(error: Exception) -> bool:
    """Returns true if the server refuses this call whenever it is made."""
    return isinstance(error, RequestRefused) and error.status not in LATER


def retry_of(error: InferenceError) -> Retryable | None:
    """Returns the error that makes the batch wait for the teacher; None if the call itself failed."""
    if isinstance(error, ServerUnavailable):
        return Retryable(f"the teacher is unavailable: {error}")
    if isinstance(error, RequestRefused) and not refused_for_good(error):
        return Retryable(f"the teacher refuses requests for now: {error}")
    return None
