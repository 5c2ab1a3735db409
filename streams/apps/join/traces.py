"""Trace contexts of waiting halves, so that outcomes and rollouts continue their traces. Kept outside the fold's state:
the join's results do not depend on them."""

from collections import OrderedDict
from collections.abc import Iterable

from schemas.records import Hint, Open, Outcome, Record, Score
from tentalis.service import tracing
from tentalis.service.tracing import TraceSpan

LIMIT = 200_000
WHOLE_TASK = -1


class Traces:
    """At most LIMIT contexts. The oldest is dropped first; a restart drops all. A sample without a context continues
    the trace derived from its task's id, which is the task's trace if this project created it."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, int], tuple[str, ...]] = OrderedDict()

    def heard(self, record: Record, headers: Iterable[tuple[str, bytes]]) -> None:
        """Stores the trace context of a halves record. Call it before the record is folded."""
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

    def span(self, outcome: Outcome) -> TraceSpan:
        """Opens the span in which an outcome and its rollout are emitted."""
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
