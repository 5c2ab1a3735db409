"""The recent results and the waiting feedback of scoring or hinting, moved to topics with more partitions. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from schemas import topics
from schemas.place import RecordPlace
from streams.fold.recent_results import FEEDBACK, RESULTS, OffsetRef, RecentResults, offset_refs
from streams.runtime.moving import Move, State, States

_TOPICS = {RESULTS: topics.RESULTS, FEEDBACK: topics.FEEDBACK}


def places(states: States) -> Iterator[RecordPlace]:
    """Yields the results and the feedback that the state refers to."""
    for partition, state in states.items():
        for kind, ref in offset_refs(state):
            yield RecordPlace(_TOPICS[kind], partition, ref.offset)


def moved(states: States, move: Move) -> dict[int, State]:
    """Returns the state of each new partition. References to results that have left their topic by retention are
    dropped: nothing can be paired with them any more."""
    refs: dict[tuple[int, str], list[OffsetRef]] = defaultdict(list)
    for partition, state in states.items():
        for kind, ref in offset_refs(state):
            old = RecordPlace(_TOPICS[kind], partition, ref.offset)
            if kind == RESULTS and old not in move.places:
                continue
            there = move.place(*old)
            refs[there.partition, kind].append(OffsetRef(there.offset, ref.time, ref.task))
    found: dict[int, State] = {}
    for target in range(move.after):
        recent = RecentResults(horizon_ms=0)  # without a time of its topics it gives up nothing
        for ref in sorted(refs[target, RESULTS]):
            recent.add_result(ref)
        for ref in sorted(refs[target, FEEDBACK]):
            recent.add_feedback(ref, answered=False)
        found[target] = {key: value for wave in recent.take_changes() for key, value in wave if value is not None}
    return found
