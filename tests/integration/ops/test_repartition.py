"""Topics moved to more partitions on a real broker, in the middle of the traffic: nothing lost, nothing twice."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from schemas import keyed_partitions, topics
from schemas.records import Outcome, OutcomeKind, Result, Score, Source, Task, Terms
from tentalis.kafka import topology
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.partitioner import partition_of
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_client import TopicClient
from tentalis.kafka.topic_id_log import read_topic_ids
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.repartition.plan import MARKER, SUFFIX
from tentalis.ops.verify import verify
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support.apps_lab import Apps
from tests.support.kafka_fixture import eventually
from tests.support.stream_records import make_result, make_task

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(1800)]

TASKS, PARTITIONS = 4000, 12
LOOKS_OFTEN = (
    "-c",
    "from streams.runtime import worker; worker.ENDS_S = 1.0; from tentalis.cli.main import app; app()",
)
# A process that does not notice the grown topic: on a busy machine it would end before the move is tried.
LOOKS_AWAY = (
    "-c",
    "from streams.runtime.topic_guard import TopicGuard\n"
    "async def looks_away(_): return True\n"
    "TopicGuard.check_running = looks_away\n"
    "from tentalis.cli.main import app\n"
    "app()",
)
DIES = """
import os
from tentalis.ops.repartition import process
from tentalis.ops.repartition.broker import MoveBroker
calls = 0
def dies(*_, **__):
    global calls
    calls += 1
    if calls == {after}:
        os.kill(os.getpid(), 9)
    return real(*_, **__)
real = {owner}.{name}
{owner}.{name} = dies
from tentalis.cli.main import app
app()
"""


def task(number: int) -> Task:
    """A task that waits for its reward alone."""
    return make_task(
        f"task-{number}", n_samples=1, terms=Terms(rl=Source.RESULT, opd=None, deadline_ms=600_000, opd_window_ms=1000)
    )


def answer(to: Task) -> Result:
    return make_result(to, opened_at=now_ms(), response=(10, 11, 12))


def repartition(settings: Settings, home: Path, *options: str, program: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", program) if program else ("-m", "tentalis.cli")), "topics", "repartition"]
    environment = os.environ | {"TENTALIS_BOOTSTRAP": settings.require_bootstrap(), "TENTALIS_HOME": str(home)}
    return subprocess.run(
        [*command, "--partitions", str(PARTITIONS), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def outcomes(apps: Apps) -> Counter[str]:
    return Counter(each.key for each in apps.read(topics.OUTCOMES, Outcome))


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
def test_partitions_grown_in_mid_run_are_moved_to_and_nothing_is_lost(
    state: str, own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path)
    admin = AdminClient(client_config(settings))
    tasks = [task(number) for number in range(TASKS)]
    with Apps(settings, tmp_path, state) as apps:
        apps.start("join", program=LOOKS_OFTEN)
        apps.start("scoring", program=LOOKS_AWAY)
        apps.put(topics.TASKS, *tasks)
        apps.put(topics.RESULTS, *map(answer, tasks[: TASKS // 2]))
        apps.wait(lambda: len(outcomes(apps)) == TASKS // 2)
        for future in admin.create_partitions([NewPartitions(topics.HALVES, PARTITIONS)]).values():
            future.result(30)
        join = apps.processes.pop("join")
        assert join.wait(60) == ExitCode.DRIFT
        assert "topics repartition" in apps.log_of("join")
        # Scores that nobody reads, on the partitions of twelve.
        apps.put(topics.RESULTS, *map(answer, tasks[TASKS // 2 : TASKS * 3 // 4]))
        apps.wait(lambda: len(apps.read(topics.HALVES, Score)) >= TASKS * 3 // 4)
        active = repartition(settings, tmp_path, "--yes")
        assert active.returncode != 0 and "tentalis-scoring" in active.stderr, active.stderr
        apps.end("scoring")

        before = admin.list_topics(timeout=15).topics
        shown = repartition(settings, tmp_path)
        assert shown.returncode == 0 and "nothing was changed" in shown.stderr, shown.stderr
        assert len(before[topics.TASKS].partitions) == 8
        for owner, name, after in (
            ("process", "copy_topic", 5),  # while the copies are made
            ("process", "copy_unchanged", 9),  # while topics are made of them
            ("process", "commit_noted", 2),
            ("MoveBroker", "settle", 3),
        ):
            died = repartition(settings, tmp_path, "--yes", program=DIES.format(owner=owner, name=name, after=after))
            assert died.returncode == -9, died.stderr
        wrong = repartition(settings, tmp_path, "--partitions", "16", "--yes")
        assert wrong.returncode == ExitCode.USAGE and "12" in wrong.stderr
        moved = repartition(settings, tmp_path, "--yes")
        assert moved.returncode == 0 and f"{keyed_partitions.VARIABLE}=12" in moved.stderr, moved.stderr

        after_topics = admin.list_topics(timeout=15).topics
        assert {len(after_topics[name].partitions) for name in topics.table().co_partitioned} == {PARTITIONS}
        assert not [name for name in after_topics if name.endswith(SUFFIX) or name == MARKER]
        for stored in read_to_end(settings, topics.OUTCOMES):
            assert stored.raw_key is not None and stored.partition == partition_of(stored.raw_key, PARTITIONS)

        monkeypatch.setenv(keyed_partitions.VARIABLE, str(PARTITIONS))
        diff = [sys.executable, "-m", "tentalis.cli", "topics", "diff", "--bootstrap-server", own_broker.bootstrap]
        same = subprocess.run(diff, capture_output=True, text=True, timeout=60, check=False)
        assert same.returncode == 0, same.stdout + same.stderr
        (state_topic,) = topology.named("join").changelogs
        now = TopicClient(settings).identities([topics.HALVES, state_topic])
        recorded = {name: each.topic_id for name, each in now.items()}
        assert read_topic_ids(settings).of("tentalis-join") == dict.fromkeys(range(PARTITIONS), recorded)
        # One that began before the move knows the old numbers of partitions for minutes.
        apps.publisher = Publisher(settings, "test", apps.codec)
        # The same instances: with RocksDB they meet the databases of the old changelogs.
        apps.start("join", program=LOOKS_OFTEN)
        apps.start("scoring")
        apps.put(topics.RESULTS, *map(answer, tasks[TASKS * 3 // 4 :]))
        apps.put(topics.RESULTS, *map(answer, tasks[: TASKS // 4]))  # the same answers once more
        apps.wait(lambda: len(outcomes(apps)) >= TASKS)
        eventually(lambda: len(apps.read(topics.HALVES, Score)) >= TASKS, 60)
        apps.end("join")
        apps.end("scoring")
        found = apps.read(topics.OUTCOMES, Outcome)
        assert Counter(each.key for each in found) == Counter(f"{each.task_id}/0" for each in tasks)
        assert OutcomeKind.EXPIRED not in {each.kind for each in found}
        assert apps.dead(topics.HALVES) == [] and apps.dead(topics.RESULTS) == []
        for name in ("join", "scoring"):
            rebuilt = re.findall(r"the state in \S+/(\d+) is a copy of another changelog", apps.log_of(name))
            assert {int(partition) for partition in rebuilt} == (set(range(8)) if state == "rocksdb" else set())
    assert [str(each) for each in verify(settings, "run").problems] == []
