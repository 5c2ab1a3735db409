"""The state that is shown, from observations alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.local.states import DEGRADED_AFTER, LiveView, ProcessState, in_words, live_state


def state(**seen: object) -> str:
    return live_state(LiveView(**seen))[0].value  # type: ignore[arg-type]


def test_a_process_starts_and_is_ready() -> None:
    assert state() == "starting"
    assert live_state(LiveView(reason="its partitions are not assigned")) == (
        ProcessState.STARTING,
        "its partitions are not assigned",
    )
    assert state(was_ready=True) == "ready"
    assert state(job=True) == "running"


def test_recovery_is_shown_at_any_time() -> None:
    for was_ready in (False, True):
        assert state(was_ready=was_ready, reason="recovering its state from the changelog") == "recovering"


def test_silence_is_shown_after_a_time_and_not_before() -> None:
    assert state(was_ready=True, silent="does not answer", silent_for=14.9) == "ready"
    assert live_state(LiveView(was_ready=True, silent="does not answer", silent_for=15.0)) == (
        ProcessState.UNRESPONSIVE,
        "does not answer (for 15 s; restarted after 60 s)",
    )


def test_a_stopped_process_is_shown_at_once() -> None:
    found, message = live_state(LiveView(was_ready=True, paused=(7, 8)))
    assert found is ProcessState.UNRESPONSIVE and "`kill -CONT 7 8`" in message


def test_a_short_unreadiness_is_no_trouble() -> None:
    reason = "its partitions are not assigned"
    assert state(was_ready=True, reason=reason, unready_for=DEGRADED_AFTER - 0.1) == "ready"
    assert live_state(LiveView(was_ready=True, reason=reason, unready_for=DEGRADED_AFTER)) == (
        ProcessState.DEGRADED,
        reason,
    )
    assert state(reason="v3 is damaged", no_grace=True) == "degraded", "its loop reports it: it has begun to work"


def test_a_process_without_its_broker_waits_and_is_not_in_trouble_itself() -> None:
    seen = LiveView(was_ready=True, reason="no broker", unready_for=60.0, down=("broker",))
    assert live_state(seen) == (ProcessState.WAITING, "waits for broker")
    assert state(was_ready=True, down=("broker",)) == "ready", "it has not noticed"


@given(
    st.builds(
        LiveView,
        job=st.booleans(),
        was_ready=st.booleans(),
        reason=st.sampled_from(["", "why", "recovering"]),
        unready_for=st.floats(0, 100),
        no_grace=st.booleans(),
        silent=st.sampled_from(["", "does not answer"]),
        silent_for=st.floats(0, 100),
        paused=st.sampled_from([(), (1,)]),
        down=st.sampled_from([(), ("broker",)]),
    )
)
def test_trouble_has_a_message_and_ready_needs_a_first_readiness(seen: LiveView) -> None:
    found, message = live_state(seen)
    assert message or found in (ProcessState.READY, ProcessState.STARTING, ProcessState.RUNNING)
    assert found is not ProcessState.READY or (seen.was_ready and not seen.paused)
    assert found is not ProcessState.UNRESPONSIVE or seen.silent or seen.paused


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0.2 s"), (9.96, "10 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
