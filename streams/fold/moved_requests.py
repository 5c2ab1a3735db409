"""The requests to forget, moved to topics with more partitions: every partition remembers every request. Pure."""

from collections.abc import Collection, Iterator

from schemas.records import Forget
from streams.fold.forgotten import FORGET, FORGET_TTL_MS, Forgotten
from streams.runtime.moving import States

Requests = Collection[tuple[int, Forget]]
"""The requests that any partition remembers, each with the earliest time at which it was read."""


def known_requests(states: States) -> Requests:
    """Returns the requests in the states of all partitions."""
    known: dict[str, tuple[int, Forget]] = {}
    for state in states.values():
        for key, value in state.items():
            if key.startswith(FORGET):
                at, request = Forgotten.decode(value)
                earlier = known.get(request.forget_id)
                known[request.forget_id] = (at if earlier is None else min(at, earlier[0])), request
    return known.values()


def moved_requests(known: Requests, target: int, begin: int) -> Iterator[tuple[str, bytes]]:
    """Yields the entries of the requests in the new partition `target`, whose first record to read is at `begin`."""
    requests = Forgotten(target, FORGET_TTL_MS)
    # Any distinct offsets before the first record to read keep their meaning.
    for before, (at, request) in enumerate(known, 1):
        yield requests.remember(begin - before, at, request)
