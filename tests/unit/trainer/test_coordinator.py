"""The conditions under which rank 0 begins a step and stops reading."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from tentalis.policies.lineage import Lineage
from tests.support.loop_records import manifest
from trainer.run.coordinator import MAX_HELD_OFFERS, Coordinator
from trainer.run.state import RunState
from trainer.run.stop_condition import FOREVER, StopCondition

NEXT = datetime(2026, 1, 1, 2, tzinfo=UTC)


class Waiting:
    """A lead with a full batch, and what it says of why it waits."""

    def __init__(
        self, *, ahead: int = 0, open_now: bool = True, stop_condition: StopCondition = FOREVER, pending: int = 8
    ) -> None:
        self.messages: list[str] = []
        self.training_hours = SimpleNamespace(open_at=lambda _: open_now, next_opening=lambda _: NEXT)
        run = SimpleNamespace(promoted_version=0)
        self.state = SimpleNamespace(steps_ahead=ahead, step=ahead, config=SimpleNamespace(max_staleness=2), run=run)
        self.stop_condition, self.planner = stop_condition, SimpleNamespace(pending=pending)
        self._waiting_for = ""

    def _follow_policy(self) -> None:
        """Nothing new."""

    def _log_wait(self, reason: str, text: Any) -> None:
        self._waiting_for = reason
        self.messages.append(text())

    def may_begin(self) -> bool:
        return Coordinator._may_begin(cast(Coordinator, self))

    def should_pause_reading(self) -> bool:
        prop = cast(Any, Coordinator.should_pause_reading)
        return bool(prop.fget(self))


def test_outside_its_hours_no_step_begins_but_by_hand() -> None:
    closed = Waiting(open_now=False)
    assert not closed.may_begin()
    assert closed.messages == [f"waiting for its training hours, until {NEXT}"]
    assert Waiting(open_now=False, stop_condition=StopCondition(1)).may_begin()
    assert Waiting(open_now=False, stop_condition=StopCondition(caught_up=True)).may_begin()
    assert Waiting().may_begin()


def test_it_runs_ahead_of_what_is_served_as_far_as_may_be_stale_and_no_further() -> None:
    assert Waiting(ahead=1).may_begin()
    for stop_condition in (FOREVER, StopCondition(1)):
        far = Waiting(ahead=2, stop_condition=stop_condition)
        assert not far.may_begin()
        assert far.messages == ["waiting: step 2 is trained, 2 steps ahead of the served version"]


def test_reading_stops_only_while_something_else_than_rollouts_is_waited_for() -> None:
    for reason, arguments in (("served", {"ahead": 2}), ("window", {"open_now": False})):
        full = Waiting(**cast(Any, arguments), pending=MAX_HELD_OFFERS + 1)
        assert not full.should_pause_reading() and not full.may_begin()
        assert full._waiting_for == reason and full.should_pause_reading()
        full.planner.pending = MAX_HELD_OFFERS
        assert not full.should_pause_reading()
    starved = Waiting(pending=MAX_HELD_OFFERS + 1)
    starved._log_wait("rollouts", lambda: "")
    assert not starved.should_pause_reading(), "nobody could end that"
    decided = Waiting(pending=MAX_HELD_OFFERS + 1)
    decided._waiting_for = "served"
    assert decided.should_pause_reading() and decided.may_begin() and not decided.should_pause_reading()


def test_a_run_that_goes_on_from_a_version_of_another_run_ends_after_its_own_steps() -> None:
    """run-1 trained 2 steps of 3, which were refused: it goes on from step 30 of the run that is served."""
    branch = manifest("run-1.1", first=34).model_copy(update={"parent_run": "served", "parent_step": 30})
    lineage = Lineage([manifest("served", first=0), manifest("run-1", first=31), branch])

    def end_reason(run: str, step: int) -> str | None:
        state = SimpleNamespace(lineage=lineage, run=SimpleNamespace(run_id=run), step=step)
        state.config = SimpleNamespace(steps=3)
        state.own_steps = cast(Any, RunState.own_steps).fget(state)
        self = SimpleNamespace(state=state, stop_condition=FOREVER, steps_done=step)
        reason: str | None = cast(Any, Coordinator.end_reason).fget(self)
        return reason

    assert [end_reason("run-1.1", step) for step in (0, 2)] == [None, None]
    assert end_reason("run-1.1", 3) == "run run-1.1 has completed its 3 steps"
    assert end_reason("run-1", 3) == "run run-1 has completed its 3 steps"
