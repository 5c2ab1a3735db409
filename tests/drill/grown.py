"""A keyed topic that gets more partitions in mid-run, and the move of all keyed topics that heals it."""

from __future__ import annotations

from collections.abc import Iterator

from confluent_kafka.admin import AdminClient, NewPartitions

from schemas import topics
from tentalis.kafka.config import client_config
from tests.drill.bench import Bench, Workload
from tests.drill.fault import Sight, fault

PARTITIONS = 12


@fault("grown", "repartition.md", code=3, says=f"{topics.HALVES} had 8 partitions and has {PARTITIONS}")
def grown_partitions(bench: Bench) -> Iterator[Sight]:
    """A third of the tasks is joined before, of a third the scores lie on the grown topic, a third is unread."""
    asked = bench.work.ask("grown", 60)
    joined, placed_anew, unread = asked[:20], asked[20:40], asked[40:]
    bench.start("join")
    bench.works("join")
    bench.work.answer(joined)
    bench.caught_up("scoring")
    bench.caught_up("join")
    admin = AdminClient(client_config(bench.settings))
    for future in admin.create_partitions([NewPartitions(topics.HALVES, PARTITIONS)]).values():
        future.result(30)
    bench.work.answer(placed_anew)
    bench.caught_up("scoring")
    sight = bench.sight("join")
    also = bench.sight("scoring")  # it writes to the topic
    assert also.code == 3, f"scoring ended with {also.code}: {also.says[-2000:]}"
    bench.work.answer(unread)
    bench.shell.env["RUN"] = "grown"
    yield sight
    runs = bench.work.runs
    bench.work = Workload(bench.settings)  # the producer of the one before knows the old numbers of partitions
    bench.work.runs |= runs
    bench.work.answer(bench.work.ask("after-grown", 20))
    bench.work.settled("grown", "after-grown")
