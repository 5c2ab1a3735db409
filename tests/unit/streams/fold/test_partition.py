"""The parts of the partition kernel: timers, requests to forget, recovery of the changelog buffer."""

import pytest

from schemas.records import Forget, Source, TaskHead, Terms
from streams.fold.changelog_buffer import ChangelogBuffer
from streams.fold.clock import BEGINNING, PartitionClock, clock_key, decode_clock, encode_clock
from streams.fold.forgotten import FORGET, Forgotten
from streams.fold.partition import PartitionKernel
from streams.fold.timers import NEVER, Timers
from streams.runtime.processor import DamagedState, stamped

HEAD = TaskHead(
    task_id="t", policy="assistant", environment="chat", terms=Terms(rl=Source.RESULT), session_id="s", user_id="ann"
)


def request(**fields: str) -> Forget:
    return Forget(forget_id="f", event_time=0, **fields)


def buffer(clock: PartitionClock) -> ChangelogBuffer:
    return ChangelogBuffer(3, clock, header="head/", payload="load/")


def test_a_timer_fires_once_at_its_latest_time_in_the_order_of_time_and_key() -> None:
    times, timers = {"b": 5, "a": 5, "moved": 9, "early": 1}, Timers[str]()
    assert timers.earliest == NEVER
    for key, time in [*times.items(), ("moved", 2), ("gone", 3)]:
        timers.set(key, time)
    assert timers.earliest == 1
    assert list(timers.fire(5, times.get)) == ["early"]
    assert list(timers.fire(6, times.get)) == ["a", "b"]
    assert list(timers.fire(100, times.get)) == ["moved"] and timers.earliest == NEVER


def test_a_timer_that_is_set_while_others_fire_fires_too_if_it_is_due() -> None:
    times, timers, fired = {"a": 1}, Timers[str](), []
    timers.set("a", 1)
    for key in timers.fire(5, times.get):
        fired.append((key, times[key]))
        times[key] += 3
        timers.set(key, times[key])
    assert fired == [("a", 1), ("a", 4)] and timers.earliest == 7


def test_a_request_that_is_read_again_expires_before_a_restored_one_that_came_after_it() -> None:
    _, later = Forgotten(3, 100).remember(14, 1_000, request(user_id="ann"))
    forgotten = Forgotten(3, 100)
    forgotten.restore(later)
    forgotten.remember(12, 500, request(session_id="s"))
    assert list(forgotten.expire(601)) == [f"{FORGET}3/12"]
    assert list(forgotten.expire(1_100)) == [] and list(forgotten.expire(1_101)) == [f"{FORGET}3/14"]
    assert not forgotten.concerns(HEAD, 0, 20)


def test_a_request_covers_what_comes_after_it_and_expires() -> None:
    clock = PartitionClock()
    changes = buffer(clock)
    kernel = PartitionKernel(3, clock, changes, 100)
    kernel.advance(0, 1_000)
    kernel.remember(request(user_id="ann"))
    assert not kernel.forgets(HEAD, 1_000)
    kernel.advance(1, 900)
    assert clock.time == 1_000 and kernel.forgets(HEAD, 5_000)
    assert [[key for key, _ in wave] for wave in changes.take(lambda _: None)] == [[f"{FORGET}3/0"], ["clock/3"]]
    kernel.advance(2, 1_101)
    kernel.drop_expired_requests()
    assert not kernel.forgets(HEAD, 5_000)
    changes.take(lambda _: None)
    kernel.advance(3, 1_101)
    assert changes.take(lambda _: None)[0] == [(f"{FORGET}3/0", None)]


def test_a_key_that_timed_out_at_a_record_takes_the_record_even_if_it_was_restored_with_it() -> None:
    clock = PartitionClock()
    kernel = PartitionKernel(3, clock, buffer(clock), 100)
    kernel.timers.set("a", 10)
    kernel.advance(4, 11)
    assert kernel.redelivered("a", 4) and not kernel.redelivered("a", 3)
    assert list(kernel.overdue({"a": 10}.get)) == ["a"] and not kernel.redelivered("a", 4)
    kernel.advance(5, 11)
    assert kernel.redelivered("a", 5)


def test_a_clock_is_restored_from_its_changelog_value() -> None:
    clock = PartitionClock()
    clock.restore({}, 3)
    assert (clock.applied, clock.time) == (-1, BEGINNING)
    clock.restore({clock_key(3): encode_clock(7, 99)}, 3)
    assert (clock.applied, clock.time) == (7, 99)
    with pytest.raises(DamagedState, match="invalid clock"):
        decode_clock(b"short")


def test_a_restored_payload_without_header_is_deleted_at_once_unless_its_record_is_read_again() -> None:
    clock, headers = PartitionClock(7, 0), dict[str, bytes]()
    changes = buffer(clock)
    entries = {"load/3/5": stamped(5, b"old"), "load/3/9": stamped(9, b"new"), "head/a": b"x", "clock/3": b""}
    payloads = changes.restore(entries.items(), {"head/": headers.__setitem__}, "test")
    assert (list(payloads), headers) == ([5, 9], {"a": b"x"}) and changes.take(lambda _: None) == []
    changes.orphans(payloads)
    clock.advance(8, 1)
    changes.folding(8)
    assert changes.take(lambda _: None)[0] == [("load/3/5", None)]
    clock.advance(9, 1)
    changes.folding(9)  # the record makes no payload this time
    assert len(changes.take(lambda _: None)) == 1
    clock.advance(10, 1)
    assert changes.take(lambda _: None)[0] == [("load/3/9", None)]


@pytest.mark.parametrize("key", ["load/3/x", "other/1", "head"])
def test_a_key_that_the_application_did_not_write_is_named(key: str) -> None:
    with pytest.raises(DamagedState, match=key):
        buffer(PartitionClock()).restore([(key, b"")], {"head/": dict[str, bytes]().__setitem__}, "test")
