"""A run as files: what its replay needs, taken off one log and put onto another.

The files are Avro object container files, each named by the sha256 of its own bytes, and `run.json` lists them. Records
keep key and content; offset, partition, append time and headers belong to a log and stay with it, so on the other log
the rollouts are found by key and digest. What is served (policies, promotions) is not part of a run's archive.
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

from schemas import avro, topics
from schemas.codec import Codec
from schemas.records import RECORDS, BatchPlan, PolicyUpdate, Record, Rollout, RunManifest, StepResult
from tentalis.config import Settings
from tentalis.kafka import Publisher, make_codec, read_to_end
from trainer.fetch import BadRollouts, Cache, examine, fetch, readable_rollouts
from trainer.offers import IMPORTER
from trainer.recording import altered, ancestors, recorded
from trainer.runlog import decoded, read_run

log = logging.getLogger(__name__)

INDEX = "run.json"
FORMAT = 1
FILE_BYTES = 64 * 2**20
"""A file is closed once its records have this many bytes, uncompressed."""
PLACES = {
    "Rollout": topics.ROLLOUTS,
    "RunManifest": topics.RUNS,
    "BatchPlan": topics.BATCHES,
    "StepResult": topics.BATCHES,
}
"""Records of an archive and their topics, in the order in which they are written: a run never names what is not
there."""
REMEDY = "nothing was imported: export the run again, or copy its files anew"


class BadArchive(RuntimeError):
    """Files of an archive that are damaged or missing, by name."""


class Conflict(RuntimeError):
    """The other log holds something else under the same keys, or has trained the policy itself; nothing was written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """`records` by record name; `left_out`: rollouts of the run that are not there any more, with the reason."""

    run_id: str
    folder: Path
    files: dict[str, dict[str, Any]]
    records: dict[str, int]
    left_out: list[str]


@dataclass(slots=True)
class Imported:
    """By record name: written now, and there already. `forgotten`: rollouts that the log has a husk of; their content
    was not written."""

    run_id: str
    written: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)


def export_run(run_id: str, settings: Settings, into: Path, *, allow_missing: bool = False) -> Exported:
    """Writes a run's archive into a folder, which may hold an older one of the same run. The same log gives the same
    files. With `allow_missing` also of a run of which rollouts are missing; husks are exported in any case.

    Raises BadArchive (the folder has another run's), CannotReplay, BadRollouts (with what is missing or forged),
    OSError.
    """
    with suppress(OSError, ValidationError):
        present = _Index.model_validate_json((into / INDEX).read_bytes())
        if present.run_id != run_id:
            raise BadArchive(f"{into} holds the archive of run {present.run_id}: name another folder with --into")
    codec = make_codec(settings)
    run = read_run(settings, codec, run_id)
    results, plans = recorded(run, None)
    # A run that came of a rollback is replayed from where its line began.
    inherited = ancestors(settings, codec, run)
    manifests = [manifest for each in (*(i.run for i in inherited), run) for manifest in each.manifests.values()]
    for each in reversed(inherited):
        plans = [*each.plans, *plans]
        results = [*recorded(each.run, len(each.plans) and each.plans[-1].step)[0], *results]
    places: dict[str, tuple[int, int]] = {}
    problems = examine(settings, codec, [row for plan in plans for row in plan.rows], None, places)
    forgotten = {problem.rollout_id for problem in problems if problem.kind == "forgotten"}
    bad = [problem for problem in problems if problem.kind != "forgotten"]
    if any(problem.kind == "forged" or not allow_missing for problem in bad):
        raise BadRollouts(bad)

    def rollouts() -> Iterator[Record]:
        for plan in plans:
            rows = [row for row in plan.rows if row.rollout_id in places and row.rollout_id not in forgotten]
            rows = [
                row.model_copy(update=dict(zip(("partition", "offset"), places[row.rollout_id], strict=True)))
                for row in rows
            ]
            found = fetch(settings, codec, rows, Cache())
            yield from (found[row.rollout_id] for row in rows)
        husks = {r.key: r for _, r in readable_rollouts(settings, codec) if r.forgotten and r.key in forgotten}
        yield from (husks[key] for key in sorted(husks))

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
        for data, count in _containers(name, records):
            file = f"{hashlib.sha256(data).hexdigest()}.avro"
            (into / file).write_bytes(data)
            files[file] = {"record": name, "topic": PLACES[name], "records": count, "bytes": len(data)}
            counts[name] += count
    left_out = [str(problem) for problem in problems]
    index = {"format": FORMAT, "run_id": run_id, "files": files, "left_out": left_out}
    (into / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return Exported(run_id, into, files, counts, left_out)


def _containers(name: str, records: Iterable[Record]) -> Iterator[tuple[bytes, int]]:
    """Container files of records of one name, and how many each holds."""
    schema = avro.current(name)
    batch: list[dict[str, Any]] = []
    size = 0
    for record in records:
        datum = record.model_dump()
        batch.append(datum)
        size += len(avro.write(schema, datum))
        if size >= FILE_BYTES:
            yield _container(name, batch), len(batch)
            batch, size = [], 0
    if batch:
        yield _container(name, batch), len(batch)


def _container(name: str, data: Sequence[Mapping[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    # The marker between blocks is drawn by default; the same records are to give the same bytes.
    marker = hashlib.sha256(name.encode()).digest()[:16]
    fastavro.writer(buffer, avro.current(name).parsed, data, codec="deflate", sync_marker=marker)
    return buffer.getvalue()


def import_run(folder: Path, settings: Settings) -> Imported:
    """Puts an archive onto a log, whatever its partitions. Done twice, it writes nothing the second time.

    Every file, and every rollout, manifest and plan, is checked before anything is written. Where the log has a husk of
    a rollout the content stays away, and a husk in the archive follows content onto the log. Raises BadArchive,
    Conflict.
    """
    index = _index(folder)
    archived = {name: list(_records_of(folder, index, name)) for name in PLACES}
    runs = {record.run_id for record in archived["RunManifest"] if isinstance(record, RunManifest)}
    if index.run_id not in runs:
        raise BadArchive(f"{folder / INDEX}: no manifest of run {index.run_id} is in its files\n{REMEDY}")
    codec = make_codec(settings)
    done = Imported(index.run_id)
    owed = {name: _owed(name, archived[name], settings, codec, done) for name in PLACES}
    _check_not_trained_here(runs, {_policy_of(record) for each in owed.values() for record in each}, settings, codec)
    publisher = Publisher(settings, IMPORTER, codec)
    for name, records in owed.items():
        for record in records:
            publisher.send(PLACES[name], record)
        publisher.flush()
        done.written[name] = len(records)
    return done


class _File(BaseModel):
    record: Literal["Rollout", "RunManifest", "BatchPlan", "StepResult"]


class _Index(BaseModel):
    format: int
    run_id: str
    files: dict[str, _File]


def _index(folder: Path) -> _Index:
    try:
        index = _Index.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError) as error:
        raise BadArchive(f"{folder / INDEX}: no index of an exported run: {_reason(error)}\n{REMEDY}") from error
    if index.format != FORMAT:
        raise BadArchive(f"{folder / INDEX}: format {index.format}, this version reads {FORMAT}\n{REMEDY}")
    wrong = [problem for file in index.files if (problem := _damage(folder / file))]
    if wrong:
        raise BadArchive("\n".join([*wrong, REMEDY]))
    return index


def _reason(error: Exception) -> str:
    """The first of what is wrong, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _damage(path: Path) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    with path.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    return None if found == path.stem else f"{path}: damaged, its sha256 is {found}"


def _records_of(folder: Path, index: _Index, name: str) -> Iterator[Record]:
    for file, entry in index.files.items():
        if entry.record != name:
            continue
        path = folder / file
        try:
            with path.open("rb") as handle:
                data = fastavro.reader(handle, avro.current(name).parsed)
                records = [RECORDS[name].model_validate(datum) for datum in data]
        # Whatever it is: fastavro raises anything on bytes that are no such file.
        except Exception as error:
            raise BadArchive(f"{path}: no Avro file of {name} records: {_reason(error)}\n{REMEDY}") from error
        for record in records:
            if (problem := altered(record)) is not None:
                raise BadArchive(f"{path}: {problem}\n{REMEDY}")
            yield record


def _policy_of(record: Record) -> str:
    assert isinstance(record, (Rollout, RunManifest, BatchPlan, StepResult))
    return record.head.policy if isinstance(record, Rollout) else record.policy


def _check_not_trained_here(runs: Collection[str], policies: Collection[str], settings: Settings, codec: Codec) -> None:
    """Raises Conflict if another run than these has published a version of one of the policies on this log: what was
    imported beside it would take part in the numbers of its versions, and in what is said of its rollouts."""
    published = {
        record.policy: record.run_id
        for stored in (read_to_end(settings, topics.POLICIES) if policies else ())
        if isinstance(record := decoded(stored, codec), PolicyUpdate)
        and record.policy in policies
        and record.run_id not in runs
    }
    if published:
        said = [f"run {run} was trained here, of the same policy {policy}" for policy, run in published.items()]
        said.append("nothing was imported: import it onto a log where that policy is not trained")
        raise Conflict("\n".join(said))


def _owed(name: str, records: Sequence[Record], settings: Settings, codec: Codec, done: Imported) -> list[Record]:
    """Those of the archived records that the log lacks. Raises Conflict."""
    wanted = {record.key: record for record in records}
    there: set[str] = set()
    husks: set[str] = set()
    conflicts: list[str] = []
    for stored in read_to_end(settings, PLACES[name]):
        mine = wanted.get(stored.key or "")
        found = None if mine is None else decoded(stored, codec)
        if mine is None or found is None:
            continue
        place = f"{PLACES[name]}[{stored.partition}]@{stored.offset}"
        if isinstance(mine, Rollout) and isinstance(found, Rollout):
            if found.digest != mine.digest:
                conflicts.append(f"{place}: rollout {mine.key} has digest {found.digest}, the archive's {mine.digest}")
            elif found.forgotten:
                husks.add(mine.key)
                there.add(mine.key)
            elif not mine.forgotten:
                there.add(mine.key)
        elif found != mine:
            conflicts.append(f"{place}: another {name} under the key {mine.key}")
        else:
            there.add(mine.key)
    if conflicts:
        raise Conflict("\n".join([*conflicts, "nothing was imported: one of the two logs was altered"]))
    done.present[name] = len(there)
    done.forgotten += sorted(husks)
    return [record for key, record in wanted.items() if key not in there]
