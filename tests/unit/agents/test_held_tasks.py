"""The tasks that a worker holds."""

from tentalis.agents.workers.held_tasks import HeldTasks
from tentalis.kafka.consumer import Stored
from tests.support.loop_records import task


def stored(offset: int) -> Stored:
    return Stored("tasks", offset % 2, offset, 0, "key", b"value", ())


def test_a_task_that_is_wanted_passes_older_ones_that_are_not() -> None:
    held = HeldTasks()
    for offset in range(4):
        held.add(stored(offset), task(f"t{offset}"))
    for expected in ("t1", "t3"):
        taken = held.take(lambda each: each.task_id in ("t1", "t3"))
        assert taken is not None and taken[1].task_id == expected
    assert held.take(lambda each: each.task_id in ("t1", "t3")) is None and len(held) == 2
    assert held.remove(lambda each: each.offset == 0) == [stored(0)]
    taken = held.take(lambda _: True)
    assert taken is not None and taken[1].task_id == "t2" and not held.take(lambda _: True)
