"""Topics that are lost, missing or resized."""

import time
from collections.abc import Iterator

from confluent_kafka.admin import AdminClient, NewPartitions

from schemas import topics
from tentalis.kafka.config import client_config
from tests.drill.bench import Bench, delete, recreate
from tests.drill.fault import Sight, fault

LOST = "lost-topics.md"
START = "does-not-start.md"
CHANGELOG = topics.changelog("tentalis-join", "state")


@fault("bench", LOST, code=7, says=f"{CHANGELOG} was deleted and created again")
def a_lost_changelog(bench: Bench) -> Iterator[Sight]:
    asked = bench.work.ask("lost-changelog")
    with bench.running("join"):
        bench.caught_up("scoring")
        bench.caught_up("join")
    recreate(bench.settings, CHANGELOG)
    yield bench.refused("join")
    bench.work.answer(asked)
    with bench.running("join"):
        bench.work.settled("lost-changelog")


@fault("bench", LOST, code=7, says=f"{topics.HALVES} was deleted and created again")
def a_recreated_input(bench: Bench) -> Iterator[Sight]:
    bench.work.verify_so_far()
    asked = bench.work.ask("recreated-input")
    with bench.running("join"):
        bench.caught_up("scoring")
        bench.caught_up("join")
    recreate(bench.settings, topics.HALVES)
    bench.stop("scoring")  # its producer knows the old topic
    sight = bench.refused("join")
    bench.shell.env["RUN"] = "recreated-input"
    yield sight
    bench.start("scoring")
    after = bench.work.ask("after-recreated-input")
    bench.work.answer([*asked, *after])
    with bench.running("join"):
        bench.work.settled("recreated-input", "after-recreated-input")


@fault("bench", LOST, code=3, says="had 8 partitions and has 9")
def more_partitions(bench: Bench) -> Iterator[Sight]:
    bench.start("sessions")
    bench.works("sessions")
    admin = AdminClient(client_config(bench.settings))
    for future in admin.create_partitions([NewPartitions(topics.SESSIONS, 9)]).values():
        future.result(30)
    yield bench.sight("sessions")
    with bench.running("sessions"):
        time.sleep(1.0)


@fault("bench", START, code=3, says=f"no topic {topics.META}, which the role aggregation needs")
def a_missing_topic(bench: Bench) -> Iterator[Sight]:
    delete(bench.settings, topics.META)
    yield bench.refused("aggregation")
    with bench.running("aggregation"):
        bench.caught_up("aggregation")
