"""When a process is started again, and when not: decided from numbers alone."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.local.restart import Again, Exit, GiveUp, Halt, History, RestartPolicy, decide

POLICY = RestartPolicy()


def run(*ends: Exit, policy: RestartPolicy = POLICY) -> tuple[list[float], History, str | None]:
    """The delays, the history at the end, and the reason for giving up if it came to that."""
    history = History()
    delays: list[float] = []
    for end in ends:
        history, verdict = decide(policy, history, end)
        if isinstance(verdict, GiveUp):
            return delays, history, verdict.reason
        assert isinstance(verdict, Again)
        delays.append(verdict.delay)
    return delays, history, None


def test_delays_double_up_to_minutes_and_retries_never_end() -> None:
    delays, history, reason = run(*[Exit(1, ran=0.3)] * 50)
    assert delays[:8] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6]
    assert delays[20:] == [300.0] * 30
    assert reason is None and history.exits == 50


def test_a_crash_loop_begins_with_the_third_failure_and_is_broken_after_the_eighth() -> None:
    found = [run(*[Exit(1, ran=20.0, ready_for=19.0)] * count)[1] for count in range(10)]
    assert [history.loops(POLICY) for history in found] == [False] * 3 + [True] * 7
    assert [history.broken(POLICY) for history in found] == [False] * 8 + [True] * 2


def test_a_healthy_time_forgives_everything() -> None:
    bad, good = Exit(1, ran=1.0), Exit(1, ran=80.0, ready_for=60.0)
    delays, history, _ = run(*([bad] * 4 + [good]) * 10)
    assert max(delays) == 3.2
    assert delays[4] == 0.2
    assert history.exits == 1


def test_ten_kills_of_one_process_are_restarted_at_once() -> None:
    for code in (-signal.SIGKILL, -signal.SIGTERM):
        delays, history, _ = run(*[Exit(code, ran=0.5)] * 10)
        assert delays == [0.2] * 10 and not history.loops(POLICY)


def test_kills_without_end_become_a_crash_loop() -> None:
    delays, history, reason = run(*[Exit(-signal.SIGKILL, ran=20.0, ready_for=10.0)] * 40)
    assert delays[:30] == [0.2] * 30 and delays[33] == pytest.approx(3.2)
    assert history.loops(POLICY) and reason is None


@pytest.mark.parametrize(
    "end",
    [
        Exit(-signal.SIGKILL, ran=300.0, hung="was not ready"),
        Exit(-signal.SIGTERM, ran=20.0, ready_for=15.0, hung="gave no sign of life"),
        Exit(-signal.SIGSEGV, ran=0.1),
    ],
)
def test_what_hangs_or_faults_is_the_process_own(end: Exit) -> None:
    assert run(*[end] * 3)[1].loops(POLICY)


def test_what_ends_because_the_broker_is_down_is_excused() -> None:
    assert run(*[Exit(1, ran=0.1, excused=True)] * 100) == ([0.2] * 100, History(), None)


def test_what_stopped_by_its_own_decision_waits_for_a_person_also_after_a_healthy_day() -> None:
    assert decide(POLICY, History(), Exit(5, ran=9e4, ready_for=9e4))[1] == Halt()
    assert decide(POLICY, History(), Exit(5, ran=1.0, excused=True))[1] == Halt()


def test_what_no_restart_can_mend_is_given_up_at_once() -> None:
    assert run(Exit(7, ran=3.0)) == ([], History(), "a restart cannot fix it")


def test_a_full_disk_is_waited_for_and_never_held_against_a_process() -> None:
    assert run(*[Exit(1, ran=0.1, no_space=True)] * 100) == ([10.0] * 100, History(), None)


def test_what_everything_needs_is_given_up_at_the_first_start() -> None:
    delays, _, reason = run(*[Exit(1, ran=0.1, needed=True)] * 20)
    assert len(delays) == 7 and reason == "failed 8 times at the first start"


def test_ends_are_told_in_words() -> None:
    assert str(Exit(3, ran=1.25)) == "exit code 3 after 1.2 s"
    assert str(Exit(-9, ran=0.5)) == "ended by SIGKILL after 0.5 s"


ends = st.builds(
    Exit,
    code=st.sampled_from([0, 1, 5, 7, -9, -15, -11, 143]),
    ran=st.floats(0, 100),
    ready_for=st.floats(0, 100),
    excused=st.booleans(),
    hung=st.sampled_from(["", "gave no sign of life"]),
    no_space=st.booleans(),
    needed=st.booleans(),
)


@given(st.lists(ends, max_size=60))
def test_only_operators_cases_end_the_retries_and_delays_stay_in_bounds(sequence: list[Exit]) -> None:
    history = History()
    for end in sequence:
        history, verdict = decide(POLICY, history, end)
        if end.code in (5, 7) and not end.hung:
            assert isinstance(verdict, Halt if end.code == 5 else GiveUp)
            return
        if isinstance(verdict, GiveUp):
            assert end.needed and history.broken(POLICY)
            return
        assert isinstance(verdict, Again) and POLICY.first_delay <= verdict.delay <= POLICY.longest_delay
