"""Every command that changes something, on a real broker: a dry run changes nothing, `--yes` does, and each prints one
document on stdout.

Each command has a case: a method of World that prepares what it changes and returns its arguments.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from schemas import topics
from schemas.records import AssignmentScope, Verifier
from schemas.topics import dlq
from tentalis.cli.main import app
from tentalis.cli.shared.record_json import to_plain
from tentalis.dlq.context import context_headers
from tentalis.gateway.http import keys
from tentalis.kafka.admin import Change, ChangeKind, KafkaAdmin
from tentalis.kafka.config import client_config
from tentalis.kafka.groups import group_names
from tentalis.kafka.offsets import commit_offsets, end_offsets
from tentalis.local.state import StateDir
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import Verdict
from tests.support import ROOT
from tests.support.commands import ADDITIONS, LEAVES, MUTATIONS, options
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab
from tests.support.loop_records import assignment, manifest, plan, promotion, result, step_result, task, update
from tests.support.schema_registry import SchemaRegistry, schema_registry
from tests.support.sessions_support import turn
from tests.support.stream_records import make_task

pytestmark = pytest.mark.broker

NOT_CARRIED_OUT = {"topics acls", "topics repartition"}
"""Other tests do: one needs a broker with an authorizer, the other moves all topics."""
CODES = {"forget": {1}}
"""Exit codes other than 0 of a command that is carried out: no application answers a request to forget here."""


class World:
    """A broker and a folder with something to change for each command. `digest` is of everything that is stored."""

    def __init__(self, lab: Lab, home: Path, registry: SchemaRegistry) -> None:
        self.lab, self.home, self.registry = lab, home, registry
        self.name = lab.name
        self.admin = KafkaAdmin(lab.settings)
        self.client = AdminClient(client_config(lab.settings))

    def digest(self, folder: Path) -> dict[str, Any]:
        """The topics with their settings and ends, the committed offsets, the registered schemas, and the files."""
        found: dict[str, Any] = {}
        for topic in self.admin.describe(name for name in self.admin.names() if not name.startswith("__")):
            found[topic.name] = dict(topic.config), [(each.start, each.end) for each in topic.partitions]
        for group in group_names(self.client):
            (future,) = self.client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
            # A group without offsets belongs to an earlier test, and the broker removes it at a moment of its own.
            if offsets := sorted((p.topic, p.partition, p.offset) for p in future.result(30).topic_partitions):
                found[group] = offsets
        for path in (path for place in (self.home, folder) for path in sorted(place.rglob("*")) if path.is_file()):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found | {"registry": json.dumps(self.registry.subjects, default=str, sort_keys=True)}

    def arguments(self, command: str) -> list[str]:
        """Prepares what a command changes and returns its arguments."""
        prepare = getattr(self, command.replace(" ", "_").replace("-", "_").replace("import", "import_"))
        return [str(each) for each in prepare()]

    # --- topics and groups

    def _topic(self) -> str:
        name = f"{self.name}-{time.monotonic_ns()}"
        self.client.create_topics([NewTopic(name, 1, 1)])[name].result(30)

        def sent() -> bool:
            self.lab.publisher.send_bytes(name, b"key", b"value")
            self.lab.publisher.flush()
            return True

        eventually(sent)
        return name

    def _group(self, suffix: str) -> str:
        group = f"tentalis-worker-{self.name}-{suffix}"
        ends = end_offsets(self.lab.settings, topics.TASKS)
        commit_offsets(self.lab.settings, group, {(topics.TASKS, p): end for p, end in ends.items()})
        return group

    def topics_acls(self) -> tuple[str, ...]:
        return "--role", "groups", "--apply"

    def topics_apply(self) -> tuple[str, ...]:
        retention = {"retention.ms": (None, "2592000001")}
        self.admin.update([Change(ChangeKind.UPDATE, topics.EVALS, 0, retention)], False)
        return ()

    def topics_delete(self) -> tuple[str, ...]:
        return (self._topic(),)

    def topics_trim(self) -> tuple[str, ...]:
        return self._topic(), "--before", "2100-01-01T00:00:00Z"

    def topics_repartition(self) -> tuple[str, ...]:
        return "--partitions", "16"

    def groups_reset_offsets(self) -> tuple[str, ...]:
        self.lab.put(topics.TASKS, make_task(f"{self.name}-reset"))
        return self._group("reset"), "--to-earliest"

    def groups_skip(self) -> tuple[str, ...]:
        group = self._group("skip")
        self.lab.publisher.send_bytes(topics.TASKS, b"k", b"not a record", partition=2)
        self.lab.publisher.flush()
        return group, "--until-good", "--topic", topics.TASKS, "--partition", "2"

    def groups_delete(self) -> tuple[str, ...]:
        return (self._group("delete"),)

    def state_rebuild(self) -> tuple[str, ...]:
        ends = end_offsets(self.lab.settings, topics.HALVES)
        commit_offsets(self.lab.settings, "tentalis-join", {(topics.HALVES, p): end for p, end in ends.items()})
        return ("join",)

    # --- records

    def _letter(self, key: str) -> str:
        """Writes a dead letter of a task and returns its place."""
        headers = context_headers(
            topic=topics.TASKS,
            partition=0,
            offset=10**9 + time.monotonic_ns() % 10**9,
            timestamp=1,
            group="tentalis-scoring",
            error_class="DecodeError",
            error="bad",
            stage="decode",
            attempts=1,
            version="0",
            failed_at=1.0,
        )
        value = self.lab.codec.encode(topics.TASKS, make_task(f"{self.name}-{key}"))
        place = dlq(topics.TASKS)
        self.lab.publisher.send_bytes(place, key.encode(), value, partition=0, headers=list(headers))
        self.lab.publisher.flush()
        return f"{place}[0]@{end_offsets(self.lab.settings, place)[0] - 1}"

    def dlq_drop(self) -> tuple[str, ...]:
        return self._letter("drop"), "--reason", "a test"

    def dlq_replay(self) -> tuple[str, ...]:
        return (self._letter("replay"),)

    def produce(self) -> tuple[str, ...]:
        path = self.home / "task.jsonl"
        path.write_text(json.dumps(to_plain(make_task(f"{self.name}-produced"))))
        return topics.TASKS, "--file", str(path)

    def import_(self) -> tuple[str, ...]:
        return (str(ROOT / "tests" / "golden" / "run"),)

    def rescore(self) -> tuple[str, ...]:
        run_id = f"{self.name}-rescore"
        verifier = Verifier(name="gsm8k", data='{"answer": "42"}')
        answered = result(task(run_id, environment="math", run_id=run_id, verifier=verifier), 0, text=r"\boxed{42}")
        self.lab.put(topics.RESULTS, answered)
        self.lab.put(topics.HALVES, score_of_result(answered, Verdict(0.0), "old/1", answered.event_time))
        return run_id, "--verifier", "math/math"

    def _session(self, name: str) -> str:
        session = f"ann/{self.name}-{name}"
        self.lab.put(topics.SESSIONS, turn(f"{self.name}-{name}", "why?", session=session, policy=self.name))
        return session

    def forget(self) -> tuple[str, ...]:
        return "--session", self._session("forget"), "--wait", "0"

    def sessions_label(self) -> tuple[str, ...]:
        return self._session("label"), "0", "--thumb", "up"

    # --- policies and runs

    def _policy(self, suffix: str, versions: int = 3) -> str:
        """Publishes versions of a policy, of which all but the last were served."""
        policy = f"{self.name}-{suffix}"
        run_id = f"run-{policy}"
        made = manifest(run_id, first=0).model_copy(update={"policy": policy, "digest": policy})
        self.lab.put(topics.RUNS, made)
        for version in range(versions):
            place = self.home / "elsewhere" / policy / f"v{version}"
            place.mkdir(parents=True)
            weights = b"weights of %d" % version
            (place / "adapter_model.safetensors").write_bytes(weights)
            sha256 = hashlib.sha256(weights).hexdigest()
            step = {"policy": policy, "run_id": run_id, "step": version}
            self.lab.put(topics.POLICIES, update(version, location=place.as_uri(), sha256=sha256, **step))
            if version < versions - 1:
                served = promotion(version, sha256=sha256).model_copy(update={"policy": policy})
                self.lab.put(topics.POLICIES, served)
        return policy

    def policy_promote(self) -> tuple[str, ...]:
        return (f"{self._policy('promote')}@v2",)

    def policy_rollback(self) -> tuple[str, ...]:
        return (self._policy("rollback"),)

    def policy_pin(self) -> tuple[str, ...]:
        return (f"{self._policy('pin')}@v0",)

    def policy_assign(self) -> tuple[str, ...]:
        return "shared", f"{self._policy('assign')}@v1"

    def policy_unassign(self) -> tuple[str, ...]:
        policy = self._policy("unassign")
        made = assignment(1, AssignmentScope.WORKER, f"w-{policy}", policy=policy, replaces=policy)
        self.lab.put(topics.POLICIES, made)
        return (f"w-{policy}",)

    def runs_delete(self) -> tuple[str, ...]:
        policy = self._policy("runs")
        run_id = f"run-{policy}"
        batch = plan(1, [f"{policy}/0"], run_id).model_copy(update={"policy": policy, "plan_id": f"plan-{policy}"})
        self.lab.put(topics.BATCHES, batch)
        self.lab.put(topics.BATCHES, step_result(1, 1, run_id, policy=policy, plan_id=f"plan-{policy}"))
        for folder in ("checkpoints/000000-001-me", "checkpoints/000001-001-me", "reports"):
            kind, _, rest = folder.partition("/")
            place = self.home / kind / run_id / rest
            place.mkdir(parents=True)
            (place / "file").write_text("content")
        return (run_id,)

    # --- files

    def init(self) -> tuple[str, ...]:
        Path("tentalis.yaml").write_text("# It is replaced.\n")
        return ()

    def _key(self) -> tuple[str, Path]:
        path = self.home / f"keys-{time.monotonic_ns()}.json"
        keys.create(path, [keys.Scope.CHAT], "ann", "", {})
        (made,) = keys.load(path)
        return made.id, path

    def keys_create(self) -> tuple[str, ...]:
        return "--user", "ann", "--keys", str(self._key()[1])

    def keys_limit(self) -> tuple[str, ...]:
        key, path = self._key()
        return key, "tokens_per_day=5", "--keys", str(path)

    def keys_revoke(self) -> tuple[str, ...]:
        key, path = self._key()
        return key, "--keys", str(path)

    def observe(self) -> tuple[str, ...]:
        with StateDir(self.home / "stack"):
            running = {"supervisor": 0, "port": 9000, "processes": {"join": {"port": 9001}}}
            (self.home / "stack" / "status.json").write_text(json.dumps(running))
        return "--into", str(self.home / "observe")

    def profile_use(self) -> tuple[str, ...]:
        Path("tentalis.yaml").write_text("profile: one\nprofiles:\n  one: {}\n  two: {}\n")
        return ("two",)

    def schemas_register(self) -> tuple[str, ...]:
        return "--registry", self.registry.url


@pytest.fixture(scope="module")
def world(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("mutations")
    with schema_registry() as registry:
        yield World(Lab(kafka.bootstrap, f"mutations-{time.time_ns()}"), home, registry)


def test_every_command_that_changes_something_has_a_case() -> None:
    names = {name.replace(" ", "_").replace("-", "_").replace("import", "import_") for name in MUTATIONS | ADDITIONS}
    assert names == {name for name in vars(World) if not name.startswith("_")} - {"digest", "arguments"}


@pytest.mark.parametrize("command", sorted(MUTATIONS | ADDITIONS))
def test_only_a_command_that_is_carried_out_changes_anything(
    command: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENTALIS_HOME", str(world.home / ("stack" if command == "observe" else ".")))
    monkeypatch.delenv("SCHEMA_REGISTRY_URL", raising=False)
    arguments = [*command.split(), *world.arguments(command)]
    if "--bootstrap-server" in options(LEAVES[command]):
        arguments += ["--bootstrap-server", world.lab.settings.require_bootstrap()]
    before = world.digest(tmp_path)

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, [*arguments, *more], input="")

    yes = ("--yes",) if command in MUTATIONS else ()
    dry = run("--dry-run", *yes, "-o", "json")
    assert dry.exit_code == 0, (dry.stdout, dry.stderr)
    assert dry.stdout.count("\n") == 1, dry.stdout
    json.loads(dry.stdout)
    if yes:
        asked = run("-o", "json")
        assert asked.exit_code == (2 if "--yes goes on" in asked.stderr else 0), asked.stderr
        assert asked.stdout.count("\n") <= 1
    assert world.digest(tmp_path) == before
    if command in NOT_CARRIED_OUT:
        return
    done = run(*yes, "-o", "yaml")
    assert done.exit_code in CODES.get(command, {0}), (done.stdout, done.stderr)
    assert len(list(yaml.safe_load_all(done.stdout))) == 1
    assert world.digest(tmp_path) != before
