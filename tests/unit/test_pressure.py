"""Back-pressure: when it is said, when it is released, and that a dead trainer's word expires."""

from schemas.records import BackPressure
from tentalis.pressure import Pressure
from trainer.pressure import HOLDS_MS, REFRESHES, Valve

NOW = 1_700_000_000_000


def valve(max_staleness: int = 2) -> Valve:
    return Valve("assistant", "run", max_staleness)


def test_it_closes_when_what_is_sampled_now_would_be_dropped_and_opens_again() -> None:
    of = valve()
    first = of.due(0, 0, NOW)
    assert first is not None and not first.closed, "a predecessor that died may have said otherwise"
    assert of.due(2, 0, NOW) is None, "two full batches: used at staleness 2, which the planner takes"
    closed = of.due(2, 1, NOW)
    assert closed is not None and closed.closed and closed.expires_at == NOW + HOLDS_MS
    assert "3 steps old, the limit is 2" in closed.reason
    opened = of.due(1, 1, NOW + 5)
    assert opened is not None and not opened.closed
    assert of.due(1, 1, NOW + 10 * HOLDS_MS) is None


def test_while_it_is_closed_it_is_said_again_before_it_expires() -> None:
    of = valve()
    said = [of.due(9, 0, NOW + second * 1000) for second in range(120)]
    times = [record.event_time for record in said if record is not None]
    assert times == list(range(NOW, NOW + 120_000, HOLDS_MS // REFRESHES))
    folded = Pressure()
    for record in said:
        if record is not None:
            folded.apply(record)
            assert folded.closed("assistant", record.event_time + HOLDS_MS // REFRESHES)


def test_what_is_said_between_two_long_steps_holds_until_it_can_be_said_again() -> None:
    of, heard = valve(), Pressure()
    for step in range(1, 5):
        of.stepped(300.0)
        said = of.due(9, 0, now := NOW + step * 300_000)
        assert said is not None, "within a step nobody looks"
        heard.apply(said)
        assert heard.closed("assistant", now + 299_999) is not None
    of.stepped(1.0)
    last = of.due(9, 0, now + 300_000)
    assert last is not None and last.expires_at == now + 300_000 + HOLDS_MS


def test_a_dead_trainer_keeps_nobody_waiting() -> None:
    folded = Pressure()
    record = valve().due(9, 0, NOW)
    assert record is not None and folded.apply(record)
    assert folded.closed("assistant", NOW + HOLDS_MS - 1) == record
    assert folded.closed("assistant", NOW + HOLDS_MS) is None
    assert folded.closed("math", NOW) is None


def test_the_last_word_counts() -> None:
    folded, of = Pressure(), valve()
    records: list[BackPressure] = [r for r in (of.due(9, 0, NOW), of.due(0, 0, NOW)) if r is not None]
    assert [folded.apply(record) for record in records] == [True, True]
    assert folded.closed("assistant", NOW) is None
    assert not folded.apply(records[-1])
