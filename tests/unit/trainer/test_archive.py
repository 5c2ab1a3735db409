"""The refusals of an import, with their messages. A run moved from log to log: test_replay_elsewhere.py."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import Record
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, manifest, plan, step_result, update
from tests.support.trainer_lab import rollout
from trainer.data.plan import with_plan_id
from trainer.replay import archive
from trainer.replay.archive import BadArchive, ImportConflict, export_run, import_run
from trainer.run.manifest import manifest_digest

CODEC = Codec()


def run_of_one_step() -> list[Record]:
    """Of the policy assistant, as an export has it."""
    trained = rollout("t", policy="assistant")
    run_manifest = manifest(first=0)
    run_manifest = run_manifest.model_copy(update={"digest": manifest_digest(run_manifest)})
    planned = plan(1, [trained.rollout_id])
    row = planned.rows[0].model_copy(update={"digest": trained.digest})
    planned = with_plan_id(planned.model_copy(update={"manifest_digest": run_manifest.digest, "rows": (row,)}))
    results = [step_result(0, 0, attempt=0, plan_id=None), step_result(1, 1, plan_id=planned.plan_id)]
    return [trained, run_manifest, planned, *results]


def archived(folder: Path, records: list[Record]) -> Path:
    """The folder, with an archive of these records."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_name[type(record).__name__].append(record)
    files = {}
    for name, each in by_name.items():
        for data, count in archive._avro_files(name, each):
            files[put(folder, data)] = {"record": name, "topic": archive.TOPICS[name], "records": count}
    index(folder, files)
    return folder


def put(folder: Path, data: bytes) -> str:
    name = f"{hashlib.sha256(data).hexdigest()}.avro"
    (folder / name).write_bytes(data)
    return name


def index(folder: Path, files: Any) -> None:
    (folder / "run.json").write_text(json.dumps({"format": 1, "run_id": RUN, "files": files, "left_out": []}))


def index_entry(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """The files of an index, and which of them has the records of that name."""
    files = json.loads((folder / "run.json").read_text())["files"]
    return files, next(file for file, entry in files.items() if entry["record"] == name)


class Log:
    """A log in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[Record] = []
        self._stored: dict[str, list[Stored]] = defaultdict(list)
        monkeypatch.setattr(archive, "make_codec", lambda _: CODEC)
        monkeypatch.setattr(archive, "read_to_end", self._read)
        monkeypatch.setattr(archive, "Publisher", lambda *_: self)

    def store(self, topic: str, *records: Record) -> None:
        for record in records:
            topic_records = self._stored[topic]
            topic_records.append(Stored(topic, 0, len(topic_records), 0, record.key, CODEC.encode(topic, record), ()))

    def _read(self, _: Settings, topic: str) -> Iterator[Stored]:
        return iter(self._stored[topic])

    def send(self, topic: str, record: Record) -> None:
        self.written.append(record)
        self.store(topic, record)

    def flush(self) -> None:
        return None


def test_a_run_is_not_imported_beside_another_one_that_was_trained_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, records = Log(monkeypatch), run_of_one_step()
    folder = archived(tmp_path, records)
    log.store(topics.POLICIES, update(0, run_id="local", step=0))
    with pytest.raises(ImportConflict, match="run local was trained here, of the same policy assistant") as refused:
        import_run(folder, Settings())
    assert "nothing was imported" in str(refused.value) and not log.written


@pytest.mark.parametrize("there", [update(0, step=0), update(0, run_id="local", policy="another")])
def test_a_run_is_imported_where_it_comes_from_and_beside_other_policies(
    there: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, records = Log(monkeypatch), run_of_one_step()
    log.store(topics.POLICIES, there)
    folder = archived(tmp_path, records)
    planned = import_run(folder, Settings(), dry_run=True)
    assert sum(planned.written.values()) == len(records) and not log.written, "a dry run counts and writes nothing"
    import_run(folder, Settings())
    assert log.written == records
    log.store(topics.POLICIES, update(7, run_id="later"))
    assert set(import_run(tmp_path, Settings()).written.values()) == {0}, "there is nothing to write"


def test_a_counterfactual_is_imported_beside_the_policy_whose_rollouts_it_has_if_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = run_of_one_step()[0]
    changed = manifest("run-1.cf-1", first=0).model_copy(update={"policy": "assistant.cf-1"})
    changed = changed.model_copy(update={"digest": manifest_digest(changed)})
    folder = archived(tmp_path, [trained, changed])
    (folder / "run.json").write_text((folder / "run.json").read_text().replace(f'"{RUN}"', '"run-1.cf-1"'))
    log = Log(monkeypatch)
    log.store(topics.POLICIES, update(0, step=0))
    with pytest.raises(ImportConflict, match="of the same policy assistant"):
        import_run(folder, Settings())
    log.store(topics.ROLLOUTS, trained)
    import_run(folder, Settings())
    assert log.written == [changed]


def test_an_export_does_not_take_the_place_of_another_runs(tmp_path: Path) -> None:
    before = (archived(tmp_path, run_of_one_step()) / "run.json").read_text()
    with pytest.raises(BadArchive, match="holds the archive of run run-1: name another folder with --into"):
        export_run("run-2", Settings(), tmp_path)
    assert (tmp_path / "run.json").read_text() == before


def nothing(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def no_object(folder: Path) -> None:
    (folder / "run.json").write_text("[]")


def half_an_index(folder: Path) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text[: len(text) // 2])


def another_format(folder: Path) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"format": 1', '"format": 2'))


def no_files(folder: Path) -> None:
    index(folder, {})


def unknown_record(folder: Path) -> None:
    files, file = index_entry(folder, "BatchPlan")
    files[file]["record"] = "Plan"
    index(folder, files)


def file_gone(folder: Path) -> None:
    (folder / index_entry(folder, "BatchPlan")[1]).unlink()


def truncated(folder: Path) -> None:
    path = folder / index_entry(folder, "Rollout")[1]
    path.write_bytes(path.read_bytes()[:-40])


def truncated_and_named_anew(folder: Path) -> None:
    named_anew(folder, "Rollout", lambda data: data[:-40])


def no_avro(folder: Path) -> None:
    named_anew(folder, "Rollout", lambda _: b"a text")


def altered_plan(folder: Path) -> None:
    trained, run_manifest, planned, *_ = run_of_one_step()
    archived(folder, [trained, run_manifest, planned.model_copy(update={"seed": 1})])


def altered_manifest(folder: Path) -> None:
    trained, run_manifest, *_ = run_of_one_step()
    archived(folder, [trained, run_manifest.model_copy(update={"threads": 2})])


def altered_rollout(folder: Path) -> None:
    trained, run_manifest, *_ = run_of_one_step()
    archived(folder, [trained.model_copy(update={"reward": 0.0}), run_manifest])


def named_anew(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    files, file = index_entry(folder, name)
    entry = files.pop(file)
    files[put(folder, change((folder / file).read_bytes()))] = entry
    index(folder, files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nothing, "run.json: not an index of an exported run: No such file or directory"),
        (no_object, "run.json: not an index of an exported run"),
        (half_an_index, "run.json: not an index of an exported run"),
        (another_format, "run.json: format 2, this version reads 1"),
        (no_files, "run.json: no manifest of run run-1 is in its files"),
        (unknown_record, "run.json: not an index of an exported run: files"),
        (file_gone, ".avro: missing"),
        (truncated, ".avro: damaged, its sha256 is "),
        (truncated_and_named_anew, ".avro: not an Avro file of Rollout records: "),
        (no_avro, ".avro: not an Avro file of Rollout records: "),
        (altered_plan, ".avro: the plan of step 1, attempt 1, of run run-1 has content that does not match its id "),
        (altered_manifest, "has content that does not match its digest"),
        (altered_rollout, ".avro: the rollout t/0 has content that does not match its digest"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_written(
    damage: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    damage(archived(tmp_path, run_of_one_step()))
    with pytest.raises(BadArchive) as refused:
        import_run(tmp_path, Settings())
    assert message in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "nothing was imported" in str(refused.value) and not log.written
