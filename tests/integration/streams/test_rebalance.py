"""Each application is a group of its own: a rebalance of one does not pause another."""

import signal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from schemas import topics
from schemas.records import Score
from tentalis.kafka.config import client_config
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tests.support.apps_lab import Apps
from tests.support.kafka_fixture import eventually
from tests.support.stream_records import make_result, make_task

pytestmark = pytest.mark.broker

# A member that sleeps is given up after its session timeout: too soon for a busy machine.
PATIENT = """
from functools import partial
import streams.runtime.worker
from tentalis.cli.main import app
streams.runtime.worker.StreamSettings = partial(streams.runtime.worker.StreamSettings, session_timeout=30.0)
app()
"""


def test_a_rebalance_of_the_join_leaves_scoring_at_work(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap)
    admin = AdminClient(client_config(settings))

    def group(app: str) -> Any:
        return admin.describe_consumer_groups([f"tentalis-{app}"])[f"tentalis-{app}"].result(10)

    def rebalances() -> bool:
        return bool(group("join").state == ConsumerGroupState.PREPARING_REBALANCING)

    def place(app: str) -> dict[str, Any]:
        return {each.member_id: sorted(map(str, each.assignment.topic_partitions)) for each in group(app).members}

    with Apps(settings, tmp_path) as apps:
        apps.start("scoring")
        apps.start("join", instance="join-a", program=("-c", PATIENT))
        apps.wait(lambda: bool(apps.owned("scoring") and apps.owned("join-a")))
        before = place("scoring")

        # A second worker joins, and the group waits for the first one, which sleeps.
        apps.processes["join-a"].send_signal(signal.SIGSTOP)
        apps.start("join", instance="join-b", program=("-c", PATIENT))
        apps.wait(rebalances)
        tasks = [make_task(f"t{number}") for number in range(30)]
        apps.put(topics.TASKS, *tasks)
        apps.put(topics.RESULTS, *map(make_result, tasks))
        eventually(lambda: len(apps.read(topics.HALVES, Score)) == len(tasks), 60)
        assert rebalances(), "scoring has done all of this while the join waited"

        apps.processes["join-a"].send_signal(signal.SIGCONT)
        every = apps.owned("scoring")
        apps.wait(lambda: apps.owned("join-a") | apps.owned("join-b") == every and apps.owned("join-a") != every)
        assert place("scoring") == before
        assert apps.log_of("scoring").count("owns partitions") == 1
        for name in ("join-a", "join-b", "scoring"):
            apps.end(name)
