"""A run replayed from a checkpoint, under another configuration, with another number of ranks, and, after it was
exported, on a log with other partitions that has really been compacted and on which somebody was forgotten."""

import json
import shutil
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from schemas import topics
from schemas.records import Rollout
from schemas.wire.avro import all_current
from tentalis.kafka.acls import ROLES, Resource
from tentalis.kafka.admin import publish_schemas
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_id_log import record_topics
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.forget.core import redacted_rollout
from tentalis.service.settings import Settings
from tentalis.storage.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.integration.trainer.test_trainer_run import Lab
from tests.support import forked
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.trainer_lab import tiny_model
from trainer.model.model import LoraPolicy
from trainer.model.policy import adapter_sha256
from trainer.replay.replay import TOLERANCE
from trainer.run.run_log import read_run

pytestmark = pytest.mark.broker


def commands(folder: Path, environment: dict[str, str], *wanted: list[str]) -> list[tuple[int, Any, str]]:
    """Commands with JSON on stdout, one after the other, in one process of their own."""
    out, err = folder / "commands.json", folder / "commands.log"
    out.unlink(missing_ok=True)
    each = json.dumps([[*arguments, "-o", "json"] for arguments in wanted])
    process = forked.start(forked.commands, each, environment, out, err)
    try:
        process.join(240)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(lines) == len(wanted), err.read_text()
        return [(code, json.loads(message) if message else None, logged) for code, message, logged in lines]
    finally:
        forked.end(process)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, model: Path) -> Lab:
    return Lab(kafka, unique[-14:].strip("-"), tmp_path, model)


def test_a_run_is_replayed_otherwise_and_elsewhere(
    kafka: Kafka, lab: Lab, tmp_path: Path, own_broker: EmbeddedBroker
) -> None:
    lab.put_groups(7)
    run_config = lab.config()
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    archive = tmp_path / "archive"
    what_if = ["replay", run_config.run_id, "--set", "lr=0.02", "--set", "optimizer.weight_decay=0.01"]
    unfit, later, other, again, two, exported = commands(
        tmp_path,
        lab.environment(),
        ["replay", run_config.run_id, "--set", "batch_rollouts=4"],
        ["replay", run_config.run_id, "--from-step", "3"],
        [*what_if, "--into", str(tmp_path / "cf")],
        what_if,
        ["replay", run_config.run_id, "--ranks", "2", "--into", str(tmp_path / "two")],
        ["export", run_config.run_id, "--into", str(archive)],
    )
    assert unfit[0] == 2 and "batch_rollouts cannot be changed" in unfit[2], unfit
    assert (later[0], [step["step"] for step in later[1]["steps"]], later[1]["equal"]) == (0, [3], True), later
    assert "training begins at the checkpoint after step 2" in later[2]

    code, report, _ = other
    assert code == 0, other
    assert report["changes"] == {
        "optimizer.lr": {"recorded": 0.01, "changed": 0.02},
        "optimizer.weight_decay": {"recorded": 0.0, "changed": 0.01},
    }
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    assert all(step["kl_to_recorded"] > 0 and step["adapter_distance"] > 0 for step in report["steps"])
    first = report["steps"][0]
    assert first["recorded"]["reward_mean"] == first["changed"]["reward_mean"]
    assert first["recorded"]["grad_norm"] == first["changed"]["grad_norm"]  # the same first gradient, another step
    page = (tmp_path / "cf" / "report.html").read_text()
    assert "optimizer.lr" in page and "<svg" in page and "http" not in page
    own = lab.run_log(lab.config().model_copy(update={"run_id": report["run_id"]}))
    assert own.first_manifest is not None and (own.first_manifest.parent_run, own.first_manifest.parent_step) == (
        run_config.run_id,
        None,
    )
    assert own.policy == report["policy"] != run_config.policy and not own.updates
    assert again[0] == 0 and again[1]["run_id"] == report["run_id"], again
    assert set(written_under(lab, report["run_id"])) == {(2, 1)}, "the same question twice is the same records"

    code, report, _ = two
    assert code == 0 and all(step["equal"] or step["distance"] < TOLERANCE for step in report["steps"]), two
    assert exported[0] == 0 and exported[1]["records"]["Rollout"] == 24, exported

    elsewhere = Elsewhere(own_broker, tmp_path)
    environment = lab.environment() | {
        "TENTALIS_BOOTSTRAP": own_broker.bootstrap,
        "TENTALIS_HOME": str(tmp_path / "elsewhere"),
    }
    damaged = archive / next(name for name, entry in exported[1]["files"].items() if entry["record"] == "BatchPlan")
    intact = damaged.read_bytes()
    damaged.write_bytes(intact[:-9] + b"x" + intact[-8:])
    ((code, _, message),) = commands(tmp_path, environment, ["import", str(archive)])
    assert code == 1 and f"{damaged}: damaged" in message
    damaged.write_bytes(intact)
    asked = ["rollouts", "query", f"SELECT count(*) AS n FROM rollouts WHERE policy = '{lab.policy}'"]
    here, once, again, there = commands(
        tmp_path,
        environment,
        [*asked, "--bootstrap-server", kafka.bootstrap],
        ["import", str(archive)],
        ["import", str(archive)],
        asked,
    )
    assert (here[1], there[1]) == ([{"n": 28}], [{"n": 24}]) and "another cluster): 24 rollouts" in there[2], (
        here,
        there,
    )
    assert once[1]["written"] == {"Rollout": 24, "RunManifest": 1, "BatchPlan": 3, "StepResult": 4}, once
    assert again[1]["written"] == dict.fromkeys(once[1]["written"], 0), again

    # A run of the same policy that begins here later has nothing of it to train on.
    local = lab.config("local", start="earliest", steps=1)
    log_file = tmp_path / "local.log"
    process = forked.start(forked.train, f"{lab.write_config(local)}\ncaught_up", environment, log_file, log_file)
    process.join(180)
    assert process.exitcode == 0, log_file.read_text()
    begun = read_run(elsewhere.settings, elsewhere.codec, local.run_id)
    assert (begun.last_step, begun.first_manifest and begun.first_manifest.first_version) == (0, 4), (
        log_file.read_text()
    )

    leaver = lab.run_log(run_config).plans[3, 1].rows[0].rollout_id
    elsewhere.write_all_again_and_forget(leaver)
    eventually(lambda: set(elsewhere.keys().values()) == {1}, 120, 0.5, lambda: str(elsewhere.keys()))
    found = {rollout.rollout_id: rollout for rollout in elsewhere.rollouts()}
    assert found[leaver].forgotten and not found[leaver].token_ids
    unlike, kept, gone, anew, fewer = commands(
        tmp_path,
        environment,
        ["replay", run_config.run_id, "--to-step", "2", "--ranks", "2"],
        ["replay", run_config.run_id, "--to-step", "2"],
        ["replay", run_config.run_id],
        ["import", str(archive)],
        asked,
    )
    assert fewer[1] == [{"n": 23}], fewer
    assert unlike[0] == 1 and "of steps 1 to 2 none is below" in unlike[1]["problems"][0], unlike
    assert (kept[0], kept[1]["equal"], len(kept[1]["steps"])) == (0, True, 3), kept
    assert (gone[0], [problem.split(":")[:2] for problem in gone[1]["problems"]]) == (1, [["forgotten", f" {leaver}"]])
    assert anew[1]["forgotten"] == [leaver] and anew[1]["written"]["Rollout"] == 0, anew


def test_what_is_changed_before_the_first_step_does_not_change_the_adapter_that_a_replay_begins_with(lab: Lab) -> None:
    """The run begins with what its first start drew; the seed of the steps is that of the second."""
    before = lab.config(steps=1)
    assert lab.train(before, "caught_up") == 0, lab.log_text(before)
    lab.put_groups(3)
    run_config = lab.config(steps=1, seed=1)
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    first, second = lab.run_log(run_config).manifests.values()
    assert first.initial_adapter_sha256 == second.initial_adapter_sha256 == lab.hashes(run_config)[0]
    assert (first.adapter_seed, second.adapter_seed) == (0, 0), "whatever the steps are seeded with"
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 2), report
    # So does a counterfactual, and its own replay.
    ((code, report, _),) = commands(lab.folder, lab.environment(), ["replay", run_config.run_id, "--set", "lr=0.02"])
    assert code == 0 and list(report["changes"]) == ["optimizer.lr"], report
    (only,) = report["steps"]
    assert only["recorded"]["grad_norm"] == only["changed"]["grad_norm"]
    changed = run_config.model_copy(update={"run_id": report["run_id"]})
    assert lab.hashes(changed)[0] == lab.hashes(run_config)[0]
    code, report = lab.replay(changed)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 2), report


def written_under(lab: Lab, run_id: str) -> list[tuple[int, int]]:
    """For every key of a run's manifests, plans and results: how many records, and how many different ones."""
    found: dict[str, list[bytes | None]] = defaultdict(list)
    for topic in (topics.RUNS, topics.BATCHES):
        for stored in read_to_end(lab.settings, topic):
            if stored.key is not None and stored.key.startswith(f"{run_id}/"):
                found[stored.key].append(stored.value)
    return [(len(values), len(set(values))) for values in found.values()]


def test_the_folder_of_the_initial_adapter_is_needed_where_the_run_begins_and_never_again(
    lab: Lab, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    policy = LoraPolicy(lab.model, "tiny-base", lab.config().lora, 5, "cpu", torch.float32)
    (given / ADAPTER_WEIGHTS).write_bytes(policy.weights_bytes())
    (given / ADAPTER_CONFIG).write_bytes(policy.files().others["adapter_config.json"])
    lab.put_groups(4)
    run_config = lab.config(steps=1, initial_adapter=str(given), keep_checkpoints=1)
    assert lab.train(run_config, "SIGKILL at save 0") == -signal.SIGKILL
    assert lab.train(lab.config(steps=1)) == 1, "with another adapter it is another run"
    assert "has no usable checkpoint" in lab.log_text(run_config)
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    shutil.rmtree(given)
    assert lab.train(run_config.model_copy(update={"steps": 2})) == 0, lab.log_text(run_config)
    assert lab.hashes(run_config)[0] == adapter_sha256(policy.weights_bytes())
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 3), report


class Elsewhere:
    """Another cluster: three partitions of rollouts, and compaction as soon as there is something to compact."""

    def __init__(self, broker: EmbeddedBroker, folder: Path) -> None:
        self.settings = Settings(bootstrap=broker.bootstrap, home=folder / "elsewhere", cache=folder / "cache")
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        config = {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.001",
            "min.compaction.lag.ms": "0",
            "max.compaction.lag.ms": "1000",
            "max.message.bytes": topics.table()[topics.ROLLOUTS].config["max.message.bytes"],
        }
        rollouts = {topics.ROLLOUTS, topics.dlq(topics.ROLLOUTS)}
        needed = {
            each.name for each in ROLES["trainer"].grants if each.resource is Resource.TOPIC and not each.prefixed
        }
        others = (needed | {topics.SCHEMAS, topics.TOPIC_IDS}) - rollouts
        made = [NewTopic(name, 1, 1, config=topics.table()[name].config) for name in others]
        made += [NewTopic(topics.ROLLOUTS, 3, 1, config=config), NewTopic(topics.dlq(topics.ROLLOUTS), 3, 1)]
        for created in admin.create_topics(made).values():
            created.result(30)
        backoff = ConfigEntry("log.cleaner.backoff.ms", "200", incremental_operation=AlterConfigOpType.SET)
        (node,) = admin.list_topics(timeout=30).brokers
        itself = ConfigResource(ResourceType.BROKER, str(node), incremental_configs=[backoff])
        for changed in admin.incremental_alter_configs([itself]).values():
            changed.result(30)
        eventually(lambda: set(admin.list_topics(timeout=30).topics) >= {each.topic for each in made}, 30)
        publish_schemas(self.settings, all_current())
        record_topics(self.settings)
        self.codec = make_codec(self.settings)
        self.publisher = Publisher(self.settings, "test", self.codec)

    def rollouts(self) -> list[Rollout]:
        stored_records = read_to_end(self.settings, topics.ROLLOUTS)
        records = [stored.decode(self.codec) for stored in stored_records if stored.key != "later"]
        return [record for record in records if isinstance(record, Rollout)]

    def write_all_again_and_forget(self, key: str) -> None:
        for rollout in self.rollouts():
            self.publisher.send(topics.ROLLOUTS, redacted_rollout(rollout) if rollout.rollout_id == key else rollout)
        self.publisher.flush()

    def keys(self) -> Counter[str]:
        """Records per key of the run. The newest segment is never compacted, so there is always something after it."""
        for partition in range(3):
            self.publisher.send_bytes(topics.ROLLOUTS, b"later", b"later", partition=partition)
        self.publisher.flush()
        keys = (stored.key for stored in read_to_end(self.settings, topics.ROLLOUTS))
        return Counter(key for key in keys if key is not None and key != "later")
