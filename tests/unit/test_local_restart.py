"""When a process is started again, and when not: decided from numbers alone."""

import signal

from hypothesis import given
from hypothesis import strategies as st

from tentalis.local.restart import Again, Exit, GiveUp, Halt, History, RestartPolicy, decide

POLICY = RestartPolicy()


def run(*ends: Exit) -> tuple[list[float], str | None]:
    """The delays, and the reason for giving up if it came to that."""
    history = History()
    delays: list[float] = []
    for end in ends:
        history, verdict = decide(POLICY, history, end)
        if isinstance(verdict, GiveUp):
            return delays, verdict.reason
        assert isinstance(verdict, Again)
        delays.append(verdict.delay)
    return delays, None


def test_delays_double_up_to_the_longest_and_the_crash_loop_ends() -> None:
    delays, reason = run(*[Exit(1, ran=6.0)] * 20)
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert reason and "ended 8 times" in reason


def test_quick_ends_in_a_row_are_given_up_sooner() -> None:
    delays, reason = run(*[Exit(1, ran=0.3)] * 20)
    assert len(delays) == 4
    assert reason and "5 times in a row within 5 s" in reason


def test_a_slower_end_in_between_is_not_a_row() -> None:
    delays, reason = run(*[Exit(1, ran=0.3)] * 4, Exit(1, ran=10.0), Exit(1, ran=0.3), Exit(1, ran=0.3))
    assert len(delays) == 7
    assert reason is None


def test_a_healthy_time_forgives_everything() -> None:
    bad, good = Exit(1, ran=1.0), Exit(1, ran=40.0, ready_for=30.0)
    delays, reason = run(*([bad] * 4 + [good]) * 10)
    assert reason is None
    assert max(delays) == 3.2
    assert delays[4] == 0.2


def test_ten_kills_of_one_process_are_restarted_at_once() -> None:
    for code in (-signal.SIGKILL, -signal.SIGTERM):
        assert run(*[Exit(code, ran=0.5)] * 10) == ([0.2] * 10, None)


def test_kills_without_end_are_given_up_and_point_at_memory() -> None:
    delays, reason = run(*[Exit(-signal.SIGKILL, ran=20.0, ready_for=10.0)] * 40)
    assert len(delays) == 29
    assert reason and "memory" in reason


def test_a_process_that_does_not_become_ready_is_no_victim() -> None:
    _, reason = run(*[Exit(-signal.SIGKILL, ran=300.0, hung="was not ready")] * 8)
    assert reason and "ended 8 times" in reason


def test_a_segmentation_fault_is_the_process_own() -> None:
    assert run(*[Exit(-signal.SIGSEGV, ran=0.1)] * 9)[1] is not None


def test_what_ends_because_the_broker_is_down_is_excused() -> None:
    assert run(*[Exit(1, ran=0.1, excused=True)] * 100) == ([0.2] * 100, None)


def test_what_stopped_by_its_own_decision_waits_for_a_person_also_after_a_healthy_day() -> None:
    assert decide(POLICY, History(), Exit(5, ran=9e4, ready_for=9e4))[1] == Halt()
    assert decide(POLICY, History(), Exit(5, ran=1.0, excused=True))[1] == Halt()


def test_what_no_restart_can_mend_is_given_up_at_once() -> None:
    assert run(Exit(7, ran=3.0)) == ([], "a restart cannot mend it")


def test_a_full_disk_is_waited_for_and_never_held_against_a_process() -> None:
    assert run(*[Exit(1, ran=0.1, no_space=True)] * 100) == ([10.0] * 100, None)


def test_what_hangs_again_and_again_is_given_up() -> None:
    _, reason = run(*[Exit(-signal.SIGTERM, ran=20.0, ready_for=15.0, hung="gave no sign of life")] * 8)
    assert reason and "ended 8 times" in reason


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
)


@given(st.lists(ends, max_size=60))
def test_delays_stay_in_bounds_and_a_process_of_its_own_fault_is_never_retried_for_ever(sequence: list[Exit]) -> None:
    history, unforgiven = History(), 0
    for end in sequence:
        history, verdict = decide(POLICY, history, end)
        if end.ready_for >= POLICY.healthy_after:
            unforgiven = 0
        unforgiven += not end.excused and not end.no_space
        if end.code in (5, 7) and not end.hung:
            assert isinstance(verdict, Halt if end.code == 5 else GiveUp)
            return
        if isinstance(verdict, GiveUp):
            assert unforgiven >= POLICY.quick_limit
            return
        assert POLICY.first_delay <= verdict.delay <= POLICY.longest_delay
        assert unforgiven < POLICY.exits_limit + POLICY.kills_limit
