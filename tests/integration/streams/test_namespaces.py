"""Two namespaces on one broker do not see each other; without one, every name is as ever."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schemas import topics
from tentalis.cli.main import app
from tentalis.cli.shared import stack_checks
from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topology import topic_table
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support import ROOT
from tests.support.apps_lab import Apps
from tests.support.fork_server import ForkedProcess
from tests.support.join_support import head, hint, open_, sample, score
from tests.support.kafka_fixture import eventually

pytestmark = pytest.mark.broker

RUN = "recorded-before-the-move"

# A namespace holds for a whole process.
ONE_TASK = """
import json, sys
from tentalis.service.settings import Settings
from tests.integration.streams.test_namespaces import one_task
print(json.dumps(one_task(Settings.from_env(), sys.argv[1])))
"""
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from tentalis.cli.main import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
"""


def one_task(settings: Settings, name: str) -> dict[str, list[str]]:
    """Sends one task through the join of the namespace of this process; the keys of what the namespace then holds."""
    task, now = head(name, 1, deadline_ms=60_000), now_ms()
    of, publisher = sample(task, 0), Publisher(settings, "test", make_codec(settings))
    for record in (open_(task, now), score(of, 1.0, at=now), hint(of, at=now)):
        publisher.send(topics.HALVES, record)
    publisher.flush()
    eventually(lambda: list(read_to_end(settings, topics.OUTCOMES)), 60)
    made = topics.OUTCOMES, topics.ROLLOUTS
    return {topic: sorted({str(stored.key) for stored in read_to_end(settings, topic)}) for topic in made}


def run(env: dict[str, str], *command: str) -> str:
    """Returns what a program prints."""
    done = subprocess.run([sys.executable, *command], env=os.environ | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_namespaces_on_one_broker(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path)
    staging = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(tmp_path / "staging")}
    staging["TENTALIS_NAMESPACE"] = "staging"
    with Apps(settings, tmp_path) as plain:
        assert KafkaAdmin(settings).names() == ["__consumer_offsets", *sorted(topic_table().topics)]
        run(staging, "-m", "tentalis.cli", "topics", "apply", "--yes")
        mine = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(tmp_path)}
        # Without --instance: a member that stops leaves its group at once.
        join = ["-m", "tentalis.cli", "serve", "join"]
        plain.processes["join"] = ForkedProcess(join, os.environ | mine, tmp_path / "join.log")
        with (tmp_path / "staging.log").open("ab") as log:  # forked processes have no namespace
            plain.processes["staging"] = subprocess.Popen(
                [sys.executable, *join], env=os.environ | staging, stdout=log, stderr=log
            )

        def here(*command: str) -> Result:
            return CliRunner().invoke(app, command, env=mine)

        found = json.loads(run(staging, "-c", ONE_TASK, "one"))
        assert found == {"staging.tentalis.outcomes.v1": ["one/0"], "staging.tentalis.rollouts.v1": ["one/0"]}
        assert not list(read_to_end(settings, topics.OUTCOMES))
        assert {str(stored.key).partition("/")[0] for stored in read_to_end(settings, topics.HALVES)} <= {"tick"}

        assert one_task(settings, "two") == {"tentalis.outcomes.v1": ["two/0"], "tentalis.rollouts.v1": ["two/0"]}
        assert [stored.key for stored in read_to_end(settings, "staging.tentalis.outcomes.v1")] == ["one/0"]
        admin = KafkaAdmin(settings)
        eventually(lambda: admin.active_groups() == ["staging.tentalis-join", "tentalis-join"], 30)
        assert {*admin.names()} - {"__consumer_offsets"} == {*topic_table().topics} | {
            f"staging.{name}" for name in topic_table().topics
        }
        monkeypatch.setattr(stack_checks, "MEMBERS_LEAVE_S", 0.0)
        for command in (["up"], ["demo"]):
            done = here(*command)
            assert done.exit_code == 1, done.output
            assert "the consumer groups tentalis-join have members" in done.stderr
            assert "`tentalis up --join`" in done.stderr and "TENTALIS_NAMESPACE=NAME" in done.stderr
        stack_checks.check_before_start(settings, join=True)
        plain.end("join")
        # The members of another namespace are no reason.
        stack_checks.check_before_start(settings)

        # A run moves from one to the other.
        archive = str(tmp_path / "archive")
        moves = [["import", str(ROOT / "tests" / "golden" / "run")], ["export", RUN, "--into", archive]]
        run(staging, "-c", COMMANDS, json.dumps(moves))
        unknown = here("replay", RUN, "--verify-only")
        assert unknown.exit_code == 1 and "there: none" in unknown.stderr
        assert here("import", archive).exit_code == 0
        moved = here("replay", RUN, "--verify-only")
        assert "Every rollout of 4 steps is present and unaltered" in moved.stdout, moved.output
