"""Exports a run to files and imports it onto another log: everything that its replay needs.

The files are Avro object container files, each named by the sha256 of its own bytes, and `run.json` lists them. Records
keep key and content; offset, partition, append time and headers belong to a log and are not exported, so on the other
log the rollouts are found by key and digest. Serving records (policies, promotions) are not part of a run's archive.
"""

import hashlib
import io
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import fastavro
from pydantic import BaseModel, ValidationError

from schemas import topics
from schemas.records import RECORDS, BatchPlan, PolicyUpdate, Record, Rollout, RunManifest, StepResult
from schemas.wire import avro
from schemas.wire.codec import Codec
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tentalis.storage.location import Location
from trainer.data.candidates import IMPORTER
from trainer.data.fetch import BadRollouts, RolloutCache, fetch, find_problems, readable_rollouts, rows_at
from trainer.replay.recording import digest_mismatch, read_ancestors, recorded_steps
from trainer.run.run_log import decode_record, read_run

log = logging.getLogger(__name__)

INDEX_FILE = "run.json"
FORMAT = 1
FILE_BYTES = 64 * 2**20
"""A file is closed when its records have this many bytes, uncompressed."""
TOPICS = {
    "Rollout": topics.ROLLOUTS,
    "RunManifest": topics.RUNS,
    "BatchPlan": topics.BATCHES,
    "StepResult": topics.BATCHES,
}
"""Records of an archive and their topics, in the order of writing: a record never references one that is not written
yet."""
REMEDY = "nothing was imported: export the run again, or copy its files again"


class BadArchive(RuntimeError):
    """Files of an archive are damaged or missing; the message names them."""


class ImportConflict(RuntimeError):
    """The other log has different records under the same keys, or has trained the policy itself; nothing was
    written."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """`records`: counts by record name. `left_out`: rollouts of the run that are missing, with the reason."""

    run_id: str
    folder: Path | Location
    files: dict[str, dict[str, Any]]
    records: dict[str, int]
    left_out: list[str]


@dataclass(slots=True)
class ImportedRun:
    """Counts by record name: `written` now, and already `present`. `forgotten`: rollouts that are redacted on the log;
    their content was not written."""

    run_id: str
    written: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)


def export_run(run_id: str, settings: Settings, into: Path, *, allow_missing: bool = False) -> ExportedRun:
    """Writes a run's archive into a folder, which may hold an older one of the same run. The same log gives the same
    files. With `allow_missing` also if rollouts of the run are missing; redacted rollouts are always exported.

    Raises BadArchive (the folder has another run's), CannotReplay, BadRollouts (with the missing or forged rollouts),
    OSError.
    """
    with suppress(OSError, ValidationError):
        existing = _ArchiveIndex.model_validate_json((into / INDEX_FILE).read_bytes())
        if existing.run_id != run_id:
            raise BadArchive(f"{into} holds the archive of run {existing.run_id}: name another folder with --into")
    codec = make_codec(settings)
    run = read_run(settings, codec, run_id)
    results, plans = recorded_steps(run, None)
    # A run created by a rollback is replayed from the start of its lineage.
    inherited = read_ancestors(settings, codec, run)
    manifests = [
        manifest
        for ancestor in (*(ancestor.run for ancestor in inherited), run)
        for manifest in ancestor.manifests.values()
    ]
    for ancestor in reversed(inherited):
        plans = [*ancestor.plans, *plans]
        results = [*recorded_steps(ancestor.run, len(ancestor.plans) and ancestor.plans[-1].step)[0], *results]
    places: dict[str, tuple[int, int]] = {}
    problems = find_problems(settings, codec, [row for plan in plans for row in plan.rows], None, places)
    forgotten = {problem.rollout_id for problem in problems if problem.kind == "forgotten"}
    blocking = [problem for problem in problems if problem.kind != "forgotten"]
    if any(problem.kind == "forged" or not allow_missing for problem in blocking):
        raise BadRollouts(blocking)

    def rollouts() -> Iterator[Record]:
        for plan in plans:
            rows = rows_at((row for row in plan.rows if row.rollout_id not in forgotten), places)
            fetched = fetch(settings, codec, rows, RolloutCache())
            yield from (fetched[row.rollout_id] for row in rows)
        redacted = {
            rollout.key: rollout
            for _, rollout in readable_rollouts(settings, codec)
            if rollout.forgotten and rollout.key in forgotten
        }
        yield from (redacted[key] for key in sorted(redacted))

    into.mkdir(parents=True, exist_ok=True)
    content: dict[str, Iterable[Record]] = {
        "Rollout": rollouts(),
        "RunManifest": manifests,
        "BatchPlan": plans,
        "StepResult": results,
    }
    files: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(content, 0)
    for name, records in content.items():
        for data, count in _avro_files(name, records):
            file = f"{hashlib.sha256(data).hexdigest()}.avro"
            (into / file).write_bytes(data)
            files[file] = {"record": name, "topic": TOPICS[name], "records": count, "bytes": len(data)}
            counts[name] += count
    left_out = [str(problem) for problem in problems]
    index = {"format": FORMAT, "run_id": run_id, "files": files, "left_out": left_out}
    (into / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return ExportedRun(run_id, into, files, counts, left_out)


def archived_run_id(index: bytes) -> str | None:
    """Returns the run of an archive by the content of its index, None if that is not an index."""
    try:
        return _ArchiveIndex.model_validate_json(index).run_id
    except ValidationError:
        return None


def _avro_files(name: str, records: Iterable[Record]) -> Iterator[tuple[bytes, int]]:
    """Yields container files of records of one name, with the number of records in each."""
    schema = avro.current(name)
    batch: list[dict[str, Any]] = []
    size = 0
    for record in records:
        datum = record.model_dump()
        batch.append(datum)
        size += len(avro.write(schema, datum))
        if size >= FILE_BYTES:
            yield _avro_file(name, batch), len(batch)
            batch, size = [], 0
    if batch:
        yield _avro_file(name, batch), len(batch)


def _avro_file(name: str, data: Sequence[Mapping[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    # The default sync marker is random; a fixed one makes the same records give the same bytes.
    marker = hashlib.sha256(name.encode()).digest()[:16]
    fastavro.writer(buffer, avro.current(name).parsed, data, codec="deflate", sync_marker=marker)
    return buffer.getvalue()


def import_run(folder: Path, settings: Settings, *, dry_run: bool = False) -> ImportedRun:
    """Imports an archive onto a log with any number of partitions. Importing it twice writes nothing the second time.

    Every file, and every rollout, manifest and plan, is checked before anything is written. If a rollout is redacted on
    the log, its content is not written; a redacted rollout in the archive is written after existing content on the log.
    With `dry_run` everything is checked and counted, and nothing is written. Raises BadArchive, ImportConflict.
    """
    index = _read_index(folder)
    archived = {name: list(_read_records(folder, index, name)) for name in TOPICS}
    runs = {record.run_id for record in archived["RunManifest"] if isinstance(record, RunManifest)}
    if index.run_id not in runs:
        raise BadArchive(f"{folder / INDEX_FILE}: no manifest of run {index.run_id} is in its files\n{REMEDY}")
    codec = make_codec(settings)
    imported = ImportedRun(index.run_id)
    missing = {name: _missing_records(name, archived[name], settings, codec, imported) for name in TOPICS}
    _check_not_trained_here(
        runs, {_policy_of(record) for records in missing.values() for record in records}, settings, codec
    )
    publisher = Publisher(settings, IMPORTER, codec)
    for name, records in missing.items():
        for record in () if dry_run else records:
            publisher.send(TOPICS[name], record)
        publisher.flush()
        imported.written[name] = len(records)
    return imported


class _File(BaseModel):
    record: Literal["Rollout", "RunManifest", "BatchPlan", "StepResult"]


class _ArchiveIndex(BaseModel):
    format: int
    run_id: str
    files: dict[str, _File]


def _read_index(folder: Path) -> _ArchiveIndex:
    try:
        index = _ArchiveIndex.model_validate_json((folder / INDEX_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise BadArchive(
            f"{folder / INDEX_FILE}: not an index of an exported run: {_first_error(error)}\n{REMEDY}"
        ) from error
    if index.format != FORMAT:
        raise BadArchive(f"{folder / INDEX_FILE}: format {index.format}, this version reads {FORMAT}\n{REMEDY}")
    problems = [problem for file in index.files if (problem := _damage_reason(folder / file))]
    if problems:
        raise BadArchive("\n".join([*problems, REMEDY]))
    return index


def _first_error(error: Exception) -> str:
    """Returns the first error, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _damage_reason(path: Path) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    with path.open("rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    return None if sha256 == path.stem else f"{path}: damaged, its sha256 is {sha256}"


def _read_records(folder: Path, index: _ArchiveIndex, name: str) -> Iterator[Record]:
    for file, entry in index.files.items():
        if entry.record != name:
            continue
        path = folder / file
        try:
            with path.open("rb") as handle:
                data = fastavro.reader(handle, avro.current(name).parsed)
                records = [RECORDS[name].model_validate(datum) for datum in data]
        # Any exception: fastavro raises various ones on bytes that are not such a file.
        except Exception as error:
            raise BadArchive(f"{path}: not an Avro file of {name} records: {_first_error(error)}\n{REMEDY}") from error
        for record in records:
            if (problem := digest_mismatch(record)) is not None:
                raise BadArchive(f"{path}: {problem}\n{REMEDY}")
            yield record


def _policy_of(record: Record) -> str:
    assert isinstance(record, (Rollout, RunManifest, BatchPlan, StepResult))
    return record.head.policy if isinstance(record, Rollout) else record.policy


def _check_not_trained_here(runs: Collection[str], policies: Collection[str], settings: Settings, codec: Codec) -> None:
    """Raises ImportConflict if another run has published a version of one of the policies on this log: an imported
    run beside it would interfere with its version numbers and with reports on its rollouts."""
    published = {
        record.policy: record.run_id
        for stored in (read_to_end(settings, topics.POLICIES) if policies else ())
        if isinstance(record := decode_record(stored, codec), PolicyUpdate)
        and record.policy in policies
        and record.run_id not in runs
    }
    if published:
        problems = [f"run {run} was trained here, of the same policy {policy}" for policy, run in published.items()]
        problems.append("nothing was imported: import it onto a log where that policy is not trained")
        raise ImportConflict("\n".join(problems))


def _missing_records(
    name: str, records: Sequence[Record], settings: Settings, codec: Codec, imported: ImportedRun
) -> list[Record]:
    """Returns the archived records that the log lacks. Raises ImportConflict."""
    archived = {record.key: record for record in records}
    present: set[str] = set()
    redacted: set[str] = set()
    conflicts: list[str] = []
    for stored in read_to_end(settings, TOPICS[name]):
        own = archived.get(stored.key or "")
        existing = None if own is None else decode_record(stored, codec)
        if own is None or existing is None:
            continue
        where = f"{TOPICS[name]}[{stored.partition}]@{stored.offset}"
        if isinstance(own, Rollout) and isinstance(existing, Rollout):
            if existing.digest != own.digest:
                conflicts.append(f"{where}: rollout {own.key} has digest {existing.digest}, the archive's {own.digest}")
            elif existing.forgotten:
                redacted.add(own.key)
                present.add(own.key)
            elif not own.forgotten:
                present.add(own.key)
        elif existing != own:
            conflicts.append(f"{where}: another {name} under the key {own.key}")
        else:
            present.add(own.key)
    if conflicts:
        raise ImportConflict("\n".join([*conflicts, "nothing was imported: one of the two logs was altered"]))
    imported.present[name] = len(present)
    imported.forgotten += sorted(redacted)
    return [record for key, record in archived.items() if key not in present]
