"""Offsets of consumer groups that an operator moves: to read again, and too far."""

from __future__ import annotations

from collections.abc import Iterator

from schemas import topics
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.partitioner import partition_of
from tests.drill.bench import Bench, until
from tests.drill.fault import Sight, fault

GROUPS = "consumer-groups.md"
LETTERS = "dead-letters.md"
RESET = "tentalis groups reset-offsets tentalis-aggregation --to-earliest --yes"
TOO_FAR = "a typing error in the offset"


@fault("bench", GROUPS, code=1, says="--force tentalis-aggregation")
def a_refused_reset(bench: Bench) -> Iterator[Sight]:
    """An application with a state is to process its topics again."""
    with bench.running("join"), bench.running("aggregation"):
        bench.work.answer(bench.work.ask("refused-reset"))
        bench.work.settled("refused-reset")
        bench.caught_up("aggregation")
    # Its session in the group ends some time after the process.
    assert until(lambda: "is active" not in bench.shell.run(RESET).says, 90, 2.0)
    yield bench.shell.run(RESET)
    with bench.running("aggregation"):
        bench.caught_up("aggregation")


@fault("bench", LETTERS, code=1, says="is a dead letter")
def skipped_too_far(bench: Bench) -> Iterator[Sight]:
    """An operator skips good tasks of one partition before scoring has read them."""
    run = "skipped-too-far"
    bench.stop("scoring")
    asked = bench.work.ask(run)
    ends = end_offsets(bench.settings, topics.TASKS)
    partition = partition_of(asked[0].task_id.encode(), len(ends))
    place = f"--topic {topics.TASKS} --partition {partition} --to {ends[partition]}"
    skip = f"tentalis groups skip tentalis-scoring {place} --yes --reason '{TOO_FAR}'"
    # Its session in the group ends some time after the process.
    assert until(lambda: bench.shell.run(skip).code == 0, 90, 2.0)
    bench.start("scoring")
    bench.caught_up("scoring")
    yield bench.shell.run(f"tentalis verify {run}")
    bench.work.answer(asked)
    with bench.running("join"):
        bench.work.settled(run)
