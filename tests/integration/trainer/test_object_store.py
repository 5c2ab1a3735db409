"""A run with its checkpoints and adapters in an object store, killed in the middle of uploads, on a real broker."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import PolicyUpdate
from tentalis.kafka.consumer import read_to_end
from tentalis.service.exit_codes import ExitCode
from tentalis.storage.file_set import list_sets, read_file, read_manifest
from tentalis.storage.location import Location
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.integration.trainer.test_trainer_run import Lab
from tests.support import forked
from tests.support.kafka_fixture import Kafka
from tests.support.object_store import FULL, Fault, ObjectStore, environment_of, object_store
from tests.support.trainer_lab import tiny_model
from trainer.config.trainer_config import TrainerConfig
from trainer.run.run_log import decode_record

pytestmark = pytest.mark.broker

STEPS = 2
KILLS = ("/adapters/{policy}/v0/manifest.json", "/checkpoints/{run}/000001-001", "/adapters/{policy}/v1/")


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as found, environment_of(found):
        yield found


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, store: ObjectStore) -> Lab:
    return Lab(kafka, unique, tmp_path, tiny_model(tmp_path / "model"))


def train(
    lab: Lab, run_config: TrainerConfig, store: ObjectStore, url: str, home: Path, kill_at: str = ""
) -> int | None:
    """The exit code of a trainer of its own, which is killed when it asks to write an object whose key holds a text."""
    log = lab.folder / f"{home.name}.log"
    environment = lab.environment() | store.environment | {"TENTALIS_STORE": url, "TENTALIS_HOME": str(home)}
    process = forked.start(forked.train, str(lab.write_config(run_config)), environment, log, log)

    def kill(request: str) -> None:
        if kill_at and request.startswith(("PUT", "POST")) and kill_at in request and process.pid:
            os.kill(process.pid, signal.SIGKILL)

    store.before = kill
    try:
        process.join(180)
        return process.exitcode
    finally:
        forked.end(process)
        store.before = lambda request: None


def served(lab: Lab) -> dict[int, str]:
    """The adapters that the log names, each read from its location and checked, by version."""
    found = {}
    for stored in read_to_end(lab.settings, topics.POLICIES):
        record = decode_record(stored, lab.codec)
        if isinstance(record, PolicyUpdate) and record.policy == lab.policy:
            place = Location.parse(record.location)
            manifest = read_manifest(place)
            assert manifest is not None and manifest.files[ADAPTER_WEIGHTS].sha256 == record.sha256
            assert read_file(place, manifest, ADAPTER_WEIGHTS)
            found[record.version] = record.sha256
    return found


def test_a_run_killed_in_its_uploads_continues_elsewhere_to_the_same_bytes(lab: Lab, store: ObjectStore) -> None:
    lab.put_groups(2 * STEPS + 1)
    url = f"{store.bucket()}/team"
    run_config = lab.config("stored", steps=STEPS)
    for number, text in enumerate(KILLS):
        at = text.format(run=run_config.run_id, policy=lab.policy)
        # A machine of its own for each: nothing but the store and the log is left of the one before.
        code = train(lab, run_config, store, url, lab.folder / f"machine-{number}", at)
        assert code == -signal.SIGKILL, f"not killed at {at}: {(lab.folder / f'machine-{number}.log').read_text()}"
        served(lab)
    store.faults = [Fault(FULL, "PUT", "000002-")]
    code = train(lab, run_config, store, url, lab.folder / "full")
    text = (lab.folder / "full.log").read_text()
    assert code == ExitCode.NEEDS_OPERATOR and "the bucket is full" in text, text
    store.faults.clear()
    assert train(lab, run_config, store, url, lab.folder / "last") == 0, (lab.folder / "last.log").read_text()
    assert list(served(lab)) == [0, 1, 2] and list(served(lab).values()) == lab.hashes(run_config)
    steps = list_sets(Location.parse(f"{url}/checkpoints/{run_config.run_id}")).sets
    assert sorted(name[:6] for name in steps) == ["000000", "000001", "000002"]
    replays_and_exports(lab, run_config.run_id, store, url)


def replays_and_exports(lab: Lab, run: str, store: ObjectStore, url: str) -> None:
    """Commands of an operator whose machine has nothing of a run: they work on the store and the log alone."""
    archive = f"{url}/archives/{run}"
    whole, later, exported, imported, missing = run_commands(
        lab,
        url,
        ["replay", run, "-o", "json"],
        ["replay", run, "--from-step", str(STEPS), "-o", "json"],
        ["export", run, "--into", archive, "-o", "json"],
        ["import", archive, "-o", "json"],
        ["import", f"{url}/archives/another", "-o", "json"],
    )
    assert [(code, json.loads(text)["equal"]) for code, text, _ in (whole, later)] == [(0, True)] * 2, later
    assert "fetched the checkpoint of step 1 from s3://" in later[2]

    assert (exported[0], json.loads(exported[1])["folder"]) == (0, archive), exported
    assert {*json.loads(exported[1])["files"]} < {key.rsplit("/")[-1] for key in store.keys(archive)}
    found = json.loads(imported[1])
    assert (imported[0], {*found["written"].values()}) == (0, {0}) and found["present"]["BatchPlan"] == STEPS, imported
    assert missing[0] == 1 and f"{url}/archives/another has no archive" in missing[2], missing


def run_commands(lab: Lab, url: str, *wanted: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command, run on a machine of its own."""
    out, err = lab.folder / "commands.jsonl", lab.folder / "commands.log"
    environment = lab.environment() | {"TENTALIS_STORE": url, "TENTALIS_HOME": str(lab.folder / "elsewhere")}
    process = forked.start(forked.commands, json.dumps(wanted), environment, out, err)
    process.join(300)
    forked.end(process)
    logged = err.read_text()
    done = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(done) == len(wanted), logged
    return [(code, text, said + logged) for code, text, said in done]
