"""The ends of a worker in the chaos run: which are told apart, and which count as a crash."""

import signal

import pytest

from tests.chaos.fault_schedule import sound
from tests.chaos.worker import Cause, cause_of

AT = "2026-01-01 00:00:00,000"
TRACEBACK = "Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\nKeyError: 't1'\n"
REASONS = {
    Cause.FENCED: [
        "tentalis-join ends: WorkerFenced('the group tentalis-join has another member'). Nothing unconfirmed"
    ],
    Cause.GROUP_LOST: ["tentalis-join ends: GroupLost('the coordinator answered'). Nothing unconfirmed"],
    Cause.OVERWRITTEN: [
        "tentalis-join ends: WrittenByAnother('x[3] ended at offset 43'). Nothing unconfirmed was committed"
    ],
    Cause.WATCHDOG: ["tentalis-join has made no progress for 121 s although there is something to do: ending"],
    Cause.BROKER_AWAY: [
        """tentalis-join ends: RecordNotDelivered(KafkaError{code=_MSG_TIMED_OUT,val=-192,str="Local"}, 't').""",
        """tentalis-join ends: RecordNotDelivered(KafkaError{code=_INCONSISTENT,val=-149,str="a later one"}, 't').""",
        """tentalis-join ends: KafkaException(KafkaError{code=UNKNOWN_LEADER_EPOCH,val=75,str="Failed to get"}).""",
        "tentalis-join ends: KafkaConnectionError('Unable to bootstrap'). Nothing unconfirmed was committed",
        "tentalis-join ends: NoAnswer('no answer within 30 s about'). Nothing unconfirmed was committed",
        "tentalis-join ends: ChangelogError('t: nothing was read: is the broker up?'). Nothing unconfirmed",
    ],
}


def log(words: str, before: str = "", after: str = "") -> str:
    begins = f"{AT} INFO streams.runtime.worker: owns partitions\n"
    return f"{begins}{before}{AT} CRITICAL streams.runtime.worker: {words}\n{after}"


@pytest.mark.parametrize(("cause", "words"), [(cause, words) for cause, said in REASONS.items() for words in said])
def test_a_worker_that_says_why_it_ends_is_told_apart(cause: Cause, words: str) -> None:
    stacks = 'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in watch\n'
    assert cause_of(1, log(words, TRACEBACK, stacks)) == (cause, f"{AT} CRITICAL streams.runtime.worker: {words}")


def test_a_command_that_found_no_broker_says_so_with_its_exit_code() -> None:
    text = "error: no Kafka answers on 127.0.0.1:1 within 20 s"
    assert cause_of(4, text) == (Cause.BROKER_AWAY, text)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, f"{AT} INFO streams.runtime.worker: owns partitions\n{TRACEBACK}"),
        (1, log("tentalis-join ends: KeyError('t1'). Nothing unconfirmed was committed", TRACEBACK)),
        (
            1,
            log("""tentalis-join ends: RecordNotDelivered(KafkaError{FATAL,code=_FENCED}, 't')."""),
        ),
        (1, f"{AT} CRITICAL somewhere.else: tentalis-join ends: WorkerFenced('x')"),
        (1, log("tentalis-join ends: TimeoutError(). Nothing unconfirmed was committed")),
        (1, log("tentalis-join ends: ChangelogError('t[0]@1 has no key'). Nothing unconfirmed was committed")),
        (5, log("tentalis-join stops: 100 records in a row failed")),
        (0, f"{AT} INFO streams.runtime.worker: tentalis-join stopped"),
        (143, f"{AT} INFO streams.runtime.worker: tentalis-join stopped"),
        (-signal.SIGSEGV, log(REASONS[Cause.FENCED][0])),
        (1, ""),
    ],
)
def test_whatever_else_ends_a_worker_is_a_crash(code: int, text: str) -> None:
    assert cause_of(code, text)[0] is Cause.CRASH


def test_the_last_log_line_decides_the_cause_of_an_exit() -> None:
    fenced, gone = REASONS[Cause.FENCED][0], "tentalis-join ends: KeyError('t1')"
    assert cause_of(1, log(fenced) + log(gone))[0] is Cause.CRASH


def test_a_crash_fails_the_run_and_what_is_explained_does_not() -> None:
    clean = {"lost": 0, "wrong": 0, "duplicates": 0, "ended": {Cause.FENCED: 3, Cause.BROKER_AWAY: 1}}
    assert sound(clean)
    assert not sound(clean | {"ended": {Cause.CRASH: 1}})
    for what in ("lost", "wrong", "duplicates"):
        assert not sound(clean | {what: 1})
