"""The join on a partition whose state or log is lost: the pure part."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Record
from streams.apps.join.given_up import LossAccount, SeenOn
from streams.apps.join.processor import JoinProcessor
from tests.support.join_support import (
    CODEC,
    LIMITS,
    PARTITION,
    START,
    drive,
    forget,
    head,
    hint,
    log_of,
    open_,
    record_at,
    sample,
    score,
)

TASKS = 6
WHAT = st.tuples(st.integers(0, TASKS - 1), st.sampled_from(["open", "score", "hint", "forget"]))


def record(number: int, what: str) -> Record:
    task = head(f"t{number}", 1 + number % 2, deadline_ms=4_000, opd_window_ms=4_000)
    match what:
        case "open":
            return open_(task)
        case "score":
            return score(sample(task))
        case "hint":
            return hint(sample(task))
    return forget(user_id=f"user-t{number}")


@given(st.lists(WHAT, max_size=30), st.booleans())
def test_each_sample_gets_one_outcome_in_all(events: list[tuple[int, str]], state_lost: bool) -> None:
    """With the state lost and the log there, and with the log lost and the state there: what the join had not written
    is given up, once; and a task that comes again cannot open."""
    log = log_of(*((number, record(*event)) for number, event in enumerate(events)))
    processor = JoinProcessor(CODEC, LIMITS)
    state: dict[str, bytes] = {}
    processor.restore(PARTITION, state)
    effects = drive(processor.process(PARTITION, log)) if log else None
    waves = effects.changes if effects is not None else []
    for key, value in (change for wave in waves for change in wave):
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    written = {output.key for output in effects.outputs if output.topic == processor.outcomes} if effects else set()

    account = LossAccount(PARTITION, LIMITS.forget_ttl_ms)
    if state_lost:
        for each, event in zip(log, events, strict=True):
            account.add_record(record(*event), SeenOn(each.offset, each.value), each.timestamp)
    else:
        account.add_state(state)
    given_up = [emission.outcome for emission in account.given_up(written, "lost")]
    keys = [outcome.key for outcome in given_up]
    assert len(set(keys)) == len(keys) and not written & set(keys)
    assert all(outcome.given_up and outcome.not_trainable == "given up: lost" for outcome in given_up)
    opened, erased = set[int](), set[int]()
    for number, what in events:
        if what == "forget":
            erased.add(number)
        elif number not in erased:
            opened.add(number)
    main = {key for key in written if key.count("/") == 1}
    assert {*main, *keys} == {f"t{number}/{index}" for number in opened for index in range(1 + number % 2)}

    applied = len(log) - 1 if state_lost else -1
    left = {key: value for wave in account.state(applied) for key, value in wave if value is not None}
    after = JoinProcessor(CODEC, LIMITS)
    after.restore(PARTITION, left)
    again = (
        drive(
            after.process(
                PARTITION,
                [
                    record_at(applied + 1 + n, len(events), open_(head(f"t{number}", 1 + number % 2)))
                    for n, number in enumerate(sorted(opened))
                ],
            )
        )
        if opened
        else None
    )
    assert after.partitions[PARTITION].open_tasks == 0
    assert again is None or again.outputs == []


def test_requests_to_forget_outlive_the_loss() -> None:
    account = LossAccount(PARTITION)
    for offset, user in enumerate(("a", "b")):
        account.add_record(forget(user_id=f"user-{user}"), SeenOn(offset, b""), START)
    left = {key: value for wave in account.state(1) for key, value in wave if value is not None}
    after = JoinProcessor(CODEC)
    after.restore(PARTITION, left)
    late = [record_at(2 + n, 5, score(sample(head(user)), at=START - 1)) for n, user in enumerate(("a", "b", "c"))]
    drive(after.process(PARTITION, late))
    assert after.partitions[PARTITION].open_tasks == 1
