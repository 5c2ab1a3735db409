"""Back-pressure: when it is said, when it is released, and that a dead trainer's word expires."""

from schemas.records import BackPressure
from tentalis.policies.backpressure import Backpressure
from trainer.run.backpressure_gate import EXPIRY_MS, REFRESHES_PER_EXPIRY, BackpressureGate

NOW = 1_700_000_000_000


def gate_with(max_staleness: int = 2) -> BackpressureGate:
    return BackpressureGate("assistant", "run", max_staleness)


def test_it_closes_when_what_is_sampled_now_would_be_dropped_and_opens_again() -> None:
    gate = gate_with()
    first = gate.due_signal(0, 0, NOW)
    assert first is not None and not first.closed, "a predecessor that died may have said otherwise"
    assert gate.due_signal(2, 0, NOW) is None, "two full batches: used at staleness 2, which the planner takes"
    closed = gate.due_signal(2, 1, NOW)
    assert closed is not None and closed.closed and closed.expires_at == NOW + EXPIRY_MS
    assert "3 steps old, the limit is 2" in closed.reason
    opened = gate.due_signal(1, 1, NOW + 5)
    assert opened is not None and not opened.closed
    assert gate.due_signal(1, 1, NOW + 10 * EXPIRY_MS) is None


def test_it_stays_open_for_the_trained_version_once_its_batch_is_trained() -> None:
    """On policy: closed for all while a batch waits or is trained; then only for the version that is still served."""
    gate, view = gate_with(0), Backpressure()
    for waiting, ahead, served, candidate in ((0, 0, False, False), (1, 0, True, True), (0, 1, True, False)):
        signal = gate.due_signal(waiting, ahead, NOW)
        assert signal is not None, "the agents must hear of each change at once"
        view.apply(signal)
        assert (view.closed("assistant", NOW) is not None) is served
        assert (view.closed("assistant", NOW, for_candidate=True) is not None) is candidate
    assert gate.due_signal(0, 1, NOW) is None


def test_a_closed_signal_is_repeated_before_it_expires() -> None:
    gate = gate_with()
    signals = [gate.due_signal(9, 0, NOW + second * 1000) for second in range(120)]
    times = [record.event_time for record in signals if record is not None]
    assert times == list(range(NOW, NOW + 120_000, EXPIRY_MS // REFRESHES_PER_EXPIRY))
    manager_view = Backpressure()
    for record in signals:
        if record is not None:
            manager_view.apply(record)
            assert manager_view.closed("assistant", record.event_time + EXPIRY_MS // REFRESHES_PER_EXPIRY)


def test_a_signal_outlasts_a_long_step() -> None:
    gate, manager_view = gate_with(), Backpressure()
    for step in range(1, 5):
        gate.set_step_duration(300.0)
        signals = gate.due_signal(9, 0, now := NOW + step * 300_000)
        assert signals is not None, "within a step nobody looks"
        manager_view.apply(signals)
        assert manager_view.closed("assistant", now + 299_999) is not None
    gate.set_step_duration(1.0)
    last = gate.due_signal(9, 0, now + 300_000)
    assert last is not None and last.expires_at == now + 300_000 + EXPIRY_MS


def test_the_signal_of_a_dead_trainer_expires() -> None:
    manager_view = Backpressure()
    record = gate_with().due_signal(9, 0, NOW)
    assert record is not None and manager_view.apply(record)
    assert manager_view.closed("assistant", NOW + EXPIRY_MS - 1) == record
    assert manager_view.closed("assistant", NOW + EXPIRY_MS) is None
    assert manager_view.closed("math", NOW) is None


def test_the_newest_signal_counts() -> None:
    manager_view, gate = Backpressure(), gate_with()
    records: list[BackPressure] = [r for r in (gate.due_signal(9, 0, NOW), gate.due_signal(0, 0, NOW)) if r is not None]
    assert [manager_view.apply(record) for record in records] == [True, True]
    assert manager_view.closed("assistant", NOW) is None
    assert not manager_view.apply(records[-1])
