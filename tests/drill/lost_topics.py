"""Topics that are lost, missing or resized."""

import time
from collections.abc import Iterator

from confluent_kafka.admin import AdminClient, NewPartitions

from schemas import topics
from tentalis.kafka.config import client_config
from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault
from tests.support.recreated import delete, recreate

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
    bench.work.verify_until_now()
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


@fault("bench", LOST, code=7, says=f"{CHANGELOG} was deleted and created again")
def a_lost_input_and_changelog(bench: Bench) -> Iterator[Sight]:
    """Kafka deletes the committed offsets with the input: neither they nor the changelog tell of the loss. The join
    does not know the open tasks any more, so that the verifier alone tells of them."""
    asked = bench.work.ask("lost-both")
    bench.work.answer(asked)
    with bench.running("join"):
        bench.work.settled("lost-both")
    bench.work.verify_until_now()
    opened = bench.work.ask("open-at-lost-both")
    with bench.running("join"):
        bench.caught_up("scoring")
        bench.caught_up("join")
    recreate(bench.settings, topics.HALVES, CHANGELOG)
    bench.stop("scoring")  # its producer knows the old topic
    sight = bench.refused("join")
    assert f"{topics.HALVES} was deleted and created again" in sight.says
    bench.shell.env["RUN"] = "open-at-lost-both"
    yield sight
    assert bench.work.given_up("open-at-lost-both") == len(opened) and not bench.work.given_up("lost-both")
    bench.start("scoring")
    bench.work.answer(bench.work.ask("after-lost-both"))
    with bench.running("join"):
        bench.work.settled("after-lost-both")


@fault("bench", LOST, code=7, says=f"{topics.POLICIES} was deleted and created again")
def a_topic_recreated_while_nothing_ran(bench: Bench) -> Iterator[Sight]:
    """No application with state reads it: only the record of topic ids tells."""
    recreate(bench.settings, topics.POLICIES)
    for command in ("serve gateway --port 0", "serve policies"):
        seen = bench.shell.run(f"tentalis {command} --server http://127.0.0.1:1")
        assert seen.code == 7 and f"{topics.POLICIES} was deleted and created again" in seen.says, seen
    yield bench.shell.run("tentalis worker --server http://127.0.0.1:1")


@fault("bench", LOST, code=3, says=f"no topic {topics.TOPIC_IDS}, which the role join needs")
def a_lost_record_of_topic_ids(bench: Bench) -> Iterator[Sight]:
    delete(bench.settings, topics.TOPIC_IDS)
    yield bench.refused("join")
    with bench.running("join"):
        bench.caught_up("join")
    asked = bench.work.ask("after-lost-record")
    bench.work.answer(asked)
    with bench.running("join"):
        bench.work.settled("after-lost-record")


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
    removed = bench.shell.run(f"tentalis topics delete {topics.META} --yes")  # on purpose, so that it is not lost
    assert removed.code == 0, removed
    yield bench.refused("aggregation")
    with bench.running("aggregation"):
        bench.caught_up("aggregation")
