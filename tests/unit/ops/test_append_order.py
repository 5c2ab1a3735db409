"""The order of entries that arrive from several topics."""

from tentalis.ops.sessions.append_order import AppendOrder
from tentalis.ops.sessions.learned import LearnedEntry


def entry(at: int, event_id: str) -> LearnedEntry:
    return LearnedEntry(at, "turn", event_id)


def ids(entries: list[LearnedEntry]) -> list[str]:
    return [each.event_id for each in entries]


def test_entries_come_by_append_time_then_topic_then_arrival() -> None:
    order = AppendOrder()
    order.add([(1, entry(5, "feedback")), (0, entry(5, "turn")), (0, entry(5, "next turn"))], 1.0)
    order.add([(2, entry(3, "earlier hint"))], 1.2)
    assert ids(order.take(1.2)) == ["earlier hint", "turn", "next turn", "feedback"]
    assert order.take(9.0) == []


def test_an_entry_waits_for_those_that_arrive_after_it() -> None:
    order = AppendOrder()
    order.add([(0, entry(5, "turn"))], 1.0)
    assert order.take(0.9) == []
    order.add([(1, entry(4, "feedback"))], 1.5)
    assert ids(order.take(1.0)) == ["turn"]
    assert ids(order.take(1.5)) == ["feedback"]
