"""Topics that are lost while nothing runs: the record of topic ids tells every process and command."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schemas import topics
from schemas.records import AuditRecord
from tentalis.cli.main import app
from tentalis.cli.status import LostTopics
from tentalis.kafka import offsets, preflight, topic_client, topic_id_log
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.topic_id_log import NoTopicIds, check_recorded, read_topic_ids, unrecorded_topics
from tentalis.kafka.topology import topic_table
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.made_topics import warning_of
from tentalis.ops import doctor
from tentalis.ops.doctor import Level
from tentalis.ops.lost_topics import lost_topics
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import ensure_topics
from tests.support.recreated import delete, recreate

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]
SERVER = ("--server", "http://127.0.0.1:1")
PROCESSES = {
    "gateway": ("serve", "gateway", *SERVER, "--port", "0"),
    "worker": ("worker", *SERVER),
    "policies": ("serve", "policies", *SERVER),
    "manager": ("manager", "--run", "r"),
}
LETTERS = topics.dlq(topics.RESULTS)


def lost_audits(settings: Settings) -> list[str]:
    codec = make_codec(settings)
    found = [stored.decode(codec) for stored in read_to_end(settings, topics.AUDIT)]
    return sorted(each.topic for each in found if isinstance(each, AuditRecord) and each.record_type == "TopicLost")


def audits(settings: Settings, kind: str) -> list[tuple[str, int | None]]:
    codec = make_codec(settings)
    found = [stored.decode(codec) for stored in read_to_end(settings, topics.AUDIT)]
    return [(each.topic, each.offset) for each in found if isinstance(each, AuditRecord) and each.record_type == kind]


def test_an_empty_broker_in_the_place_of_that_of_a_stack_is_refused(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = Settings(bootstrap=own_broker.bootstrap, home=home)

    def run(*command: str, home: Path = home) -> Result:
        env = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(home)}
        return CliRunner().invoke(app, command, env=env)

    assert lost_topics(settings) == [], "a new broker"
    for _ in range(2):  # at the second time there is nothing to do
        made = run("topics", "apply", "--yes", "--of-stack")
        assert made.exit_code == 0, made.output
        assert warning_of(settings) is None and audits(settings, "TopicIdsBegun") == []
    delete(settings, *topic_table().topics)
    (said,) = lost_topics(settings)
    assert "has none of the topics that the stack" in said
    assert run("topics", "diff").exit_code == ExitCode.PERMANENT
    refused = run("topics", "apply", "--yes", "--of-stack")
    assert refused.exit_code == ExitCode.PERMANENT and said in refused.stderr and "--accept-loss" in refused.stderr
    assert lost_topics(settings.model_copy(update={"home": tmp_path / "other"})) == [], "not the home of a stack"
    assert run("topics", "apply", "--yes", "--dry-run", home=tmp_path / "other").exit_code == 0
    accepted = run("topics", "apply", "--yes", "--of-stack", "--accept-loss")
    assert accepted.exit_code == 0 and f"given up, as --accept-loss asks: {said}" in accepted.stderr, accepted.output
    assert lost_audits(settings) == [topics.TOPIC_IDS] and lost_topics(settings) == []


def test_topics_lost_while_nothing_runs_are_named_until_somebody_accepts_the_loss(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home is empty, as on another machine or with checkpoints in an object store."""
    # tests/unit/kafka/test_known_topics.py holds the wait for a topic that is gone.
    for asks in (topic_client, offsets):
        monkeypatch.setattr(asks, "TOPIC_PATIENCE_S", 0.5)
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path / "empty")
    env = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(tmp_path / "empty")}

    def run(*command: str) -> Result:
        return CliRunner().invoke(app, command, env=env)

    ensure_topics(settings)
    assert lost_topics(settings) == [] and run("topics", "diff").exit_code == 0
    check_recorded(settings, [topics.TASKS, topics.ROLLOUTS])

    recreate(settings, topics.TASKS, topics.ROLLOUTS, topics.BATCHES)
    delete(settings, LETTERS)
    for name, command in PROCESSES.items():
        done = run(*command)
        assert done.exit_code == ExitCode.PERMANENT, (name, done.output)
        assert f"{topics.TASKS} was deleted and created again" in done.output, name
        assert "topics apply --accept-loss" in done.output, name
    said = lost_topics(settings)
    named = {
        topics.TASKS: "worker, gateway, manager: ",
        topics.ROLLOUTS: "policies, trainer: ",
        topics.BATCHES: "gateway, manager, policies, trainer: ",
    }
    for topic, readers in named.items():
        (line,) = [each for each in said if f"{topic} was deleted and created again" in each]
        assert set(line.partition(": ")[0].split(", ")) >= set(readers.removesuffix(": ").split(", ")), line
    assert any(each.startswith(f"{LETTERS} is gone") for each in said) and len(said) == 4, said
    assert LostTopics(settings).found().losses == tuple(said), "`status`"
    assert {each.found for each in doctor.lost_topics(settings) if each.level is Level.FAIL} == set(said)
    diff = run("topics", "diff")
    assert diff.exit_code == ExitCode.PERMANENT and all(f"lost: {each}" in diff.stderr for each in said)

    refused = run("topics", "apply", "--yes")
    assert refused.exit_code == ExitCode.PERMANENT and all(each in refused.stderr for each in said)
    assert lost_audits(settings) == []
    accepted = run("topics", "apply", "--yes", "--accept-loss")
    assert accepted.exit_code == 0, accepted.output
    assert f"given up, as --accept-loss asks: {topics.TASKS} was deleted" in accepted.stderr
    assert lost_topics(settings) == [] and run("topics", "diff").exit_code == 0
    assert lost_audits(settings) == sorted([topics.TASKS, topics.ROLLOUTS, topics.BATCHES, LETTERS])
    check_recorded(settings, [topics.TASKS, topics.ROLLOUTS, topics.BATCHES])

    # A topic that is gone is lost too, and not missing: `topics apply` alone does not create it.
    monkeypatch.setattr(preflight, "TOPIC_PATIENCE_S", 0.0)
    config = tmp_path / "run.yaml"
    config.write_text("{run_id: r, policy: p, base_model: m, base_model_name: m}", encoding="utf-8")
    delete(settings, topics.RUNS, topics.HALVES)
    for gone, command in (
        (topics.RUNS, PROCESSES["gateway"]),
        (topics.RUNS, ("train", "--config", str(config))),
        (topics.HALVES, ("serve", "join")),
    ):
        done = run(*command)
        assert done.exit_code == ExitCode.PERMANENT and f"{gone} is gone (its id was " in done.output, done.output
        assert "topics apply --accept-loss" in done.output
    assert run("topics", "apply", "--yes").exit_code == ExitCode.PERMANENT
    assert run("topics", "apply", "--yes", "--accept-loss").exit_code == 0

    # What an operator deletes on purpose, and nobody reads, is created again without a word.
    assert run("topics", "delete", LETTERS, "--yes").exit_code == 0
    assert lost_topics(settings) == []
    assert run("topics", "apply", "--yes").exit_code == 0

    # The record itself is lost: it is made again, which `apply` says.
    monkeypatch.setattr(topic_id_log, "RECORD_PATIENCE_S", 0.0)
    recreate(settings, topics.TOPIC_IDS)
    with pytest.raises(NoTopicIds, match=r"topics apply"):
        check_recorded(settings, [topics.TASKS])
    assert run(*PROCESSES["worker"]).exit_code == ExitCode.DRIFT
    assert run("topics", "diff").exit_code == ExitCode.DRIFT
    delete(settings, topics.TOPIC_IDS)
    assert run(*PROCESSES["worker"]).exit_code == ExitCode.DRIFT
    assert audits(settings, "TopicIdsBegun") == [], "no record has begun on topics that were there before"
    existed = len(unrecorded_topics(settings))
    made = run("topics", "apply", "--yes", "--of-stack")
    assert audits(settings, "TopicIdsBegun") == [(topics.TOPIC_IDS, existed)] and existed > 0
    assert f"it takes the {existed} topics" in str(warning_of(settings)), "`up` shows it"
    assert made.exit_code == 0 and f"{topics.TOPIC_IDS} is new, or was lost" in made.stderr, made.output
    check_recorded(settings, [topics.TASKS])
    assert read_topic_ids(settings).all_topics is not None and run("topics", "diff").exit_code == 0
