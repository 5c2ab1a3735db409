"""The trace contexts of halves that wait, so that what they become continues their traces. Beside the fold, never in
its state: what the join writes does not depend on it."""

from collections import OrderedDict
from collections.abc import Iterable

from schemas.records import Hint, Open, Outcome, Record, Score
from tentalis import tracing
from tentalis.tracing import Span

LIMIT = 200_000
WHOLE_TASK = -1


class Traces:
    """At most LIMIT contexts, the oldest forgotten first; a restart forgets them all. A sample without one continues
    the trace that is derived from its task's id, which is the task's own if we created it."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, int], tuple[str, ...]] = OrderedDict()

    def heard(self, record: Record, headers: Iterable[tuple[str, bytes]]) -> None:
        """A record of the halves log, before it is folded."""
        traceparent = tracing.traceparent_of(headers)
        if traceparent is None:
            return
        match record:
            case Open():
                place = (record.head.task_id, WHOLE_TASK)
            case Score() | Hint():
                place = (record.sample.head.task_id, record.sample.sample_index)
            case _:
                return
        known = self._contexts.pop(place, ())
        self._contexts[place] = known if traceparent in known else (*known, traceparent)
        if len(self._contexts) > LIMIT:
            self._contexts.popitem(last=False)

    def span(self, outcome: Outcome) -> Span:
        """The span in which an outcome and its rollout are emitted."""
        if not tracing.enabled():
            return tracing.span("join")
        task_id = outcome.head.task_id
        halves = self._contexts.pop((task_id, outcome.sample_index), ())
        parents = halves or self._contexts.get((task_id, WHOLE_TASK), ())
        span = tracing.span(
            "join",
            parent=parents[0] if parents else tracing.derived(task_id),
            task_id=task_id,
            sample_index=outcome.sample_index,
            outcome=outcome.kind.value,
        )
        span.link(parents[1:])
        return span
