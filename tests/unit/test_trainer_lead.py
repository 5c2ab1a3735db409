"""Whether rank 0 may begin a step, and when it stops reading."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from trainer.goal import FOREVER, Goal
from trainer.lead import HELD_OFFERS, Lead

NEXT = datetime(2026, 1, 1, 2, tzinfo=UTC)


class Waiting:
    """A lead with a full batch, and what it says of why it waits."""

    def __init__(self, *, ahead: int = 0, open_now: bool = True, goal: Goal = FOREVER, pending: int = 8) -> None:
        self.said: list[str] = []
        self.windows = SimpleNamespace(open_at=lambda _: open_now, next_opening=lambda _: NEXT)
        run = SimpleNamespace(promoted=0)
        self.head = SimpleNamespace(ahead=ahead, step=ahead, config=SimpleNamespace(max_staleness=2), run=run)
        self.goal, self.planner = goal, SimpleNamespace(pending=pending)
        self._waits_for = ""

    def _follow_policy(self) -> None:
        """Nothing new."""

    def _heartbeat(self, reason: str, text: Any) -> None:
        self._waits_for = reason
        self.said.append(text())

    def may_begin(self) -> bool:
        return Lead._may_begin(cast(Lead, self))

    def holds(self) -> bool:
        prop = cast(Any, Lead.holds)
        return bool(prop.fget(self))


def test_outside_its_hours_no_step_begins_but_by_hand() -> None:
    closed = Waiting(open_now=False)
    assert not closed.may_begin()
    assert closed.said == [f"waits for its hours, until {NEXT}"]
    assert Waiting(open_now=False, goal=Goal(1)).may_begin()
    assert Waiting(open_now=False, goal=Goal(caught_up=True)).may_begin()
    assert Waiting().may_begin()


def test_it_runs_ahead_of_what_is_served_as_far_as_may_be_stale_and_no_further() -> None:
    assert Waiting(ahead=1).may_begin()
    for goal in (FOREVER, Goal(1)):
        far = Waiting(ahead=2, goal=goal)
        assert not far.may_begin()
        assert far.said == ["waits: step 2 is trained, 2 steps beyond what is served"]


def test_reading_stops_only_while_something_else_than_rollouts_is_waited_for() -> None:
    for reason, more in (("served", {"ahead": 2}), ("window", {"open_now": False})):
        full = Waiting(**cast(Any, more), pending=HELD_OFFERS + 1)
        assert not full.holds() and not full.may_begin()
        assert full._waits_for == reason and full.holds()
        full.planner.pending = HELD_OFFERS
        assert not full.holds()
    starved = Waiting(pending=HELD_OFFERS + 1)
    starved._heartbeat("rollouts", lambda: "")
    assert not starved.holds(), "nobody could end that"
    decided = Waiting(pending=HELD_OFFERS + 1)
    decided._waits_for = "served"
    assert decided.holds() and decided.may_begin() and not decided.holds()
