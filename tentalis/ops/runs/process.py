"""Reads the runs from the log, finds what is stored of a run, here and in TENTALIS_STORE, and deletes it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tentalis.kafka import topology
from tentalis.kafka.config import client_config
from tentalis.kafka.groups import describe_groups
from tentalis.ops.runs.core import RunHistory, RunsView
from tentalis.ops.runs.deletion import DeletionRefused, DeletionRow, StoredPart
from tentalis.policies.view_reader import control_records
from tentalis.service.settings import Settings
from tentalis.storage.file_set import list_sets, remove_set
from tentalis.storage.location import Location
from tentalis.storage.places import adapters_location, checkpoints_location

_CHECKPOINT = re.compile(r"(\d+)-\d+-.*")


def read_runs(settings: Settings) -> RunsView:
    """Reads the control topics to their ends. Raises NoSuchTopic, KafkaException."""
    view = RunsView()
    for record in control_records(settings):
        view.apply(record)
    return view


def check_inactive(settings: Settings, view: RunsView, run: RunHistory) -> None:
    """Raises DeletionRefused if a trainer of the run's policy is running and this is the policy's newest run."""
    group = topology.named("trainer").consumer_group(policy=run.policy)
    described = describe_groups(AdminClient(client_config(settings)), [group])[group]
    if described.members and is_newest(view, run):
        raise DeletionRefused(
            f"run {run.run_id} is being trained: the group {group} has {len(described.members)} members. Stop the "
            "trainer first"
        )


def is_newest(view: RunsView, run: RunHistory) -> bool:
    """True if no later run of the policy has begun."""
    return view.versions.lineage(run.policy).runs[-1] == run.run_id


def stored_parts(settings: Settings, view: RunsView, run: RunHistory) -> list[StoredPart]:
    """Returns the folders of a run: checkpoints, adapters, files of trackers, reports. Checkpoints and adapters in
    TENTALIS_STORE, if it is set, and those that TENTALIS_HOME has besides. Raises StorageError."""
    first, found = run.manifests[0].first_version, list[StoredPart]()
    for parent in _with_home(checkpoints_location(settings, run.run_id), settings.home / "checkpoints" / run.run_id):
        for name, size in _folders(parent).items():
            if (named := _CHECKPOINT.fullmatch(name)) is not None:
                step = int(named[1])
                found.append(StoredPart("checkpoint", parent / name, size, first + step, step))
    for parent in _with_home(adapters_location(settings, run.policy), settings.home / "adapters" / run.policy):
        sizes = _folders(parent)
        for update in view.updates(run):
            if (name := f"v{update.version}") in sizes:
                found.append(StoredPart("adapter", parent / name, sizes[name], update.version, update.step))
    for kind, folder in (("tracking", "tracking"), ("report", "reports")):
        path = settings.home / folder / run.run_id
        if path.is_dir():
            found.append(StoredPart(kind, Location.of_folder(path), _size(path)))
    return found


def _with_home(place: Location, folder: Path) -> list[Location]:
    """Returns a place, and the folder below TENTALIS_HOME if that is another one."""
    return list(dict.fromkeys((place, Location.of_folder(folder))))


def _folders(parent: Location) -> dict[str, int]:
    """Returns the folders, or the sets of an object store, below a location with their bytes."""
    if parent.folder is None:
        return list_sets(parent).sets
    return {path.name: _size(path) for path in sorted(parent.folder.glob("*")) if path.is_dir()}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def delete(rows: Sequence[DeletionRow]) -> int:
    """Deletes the folders of a plan; returns the bytes that are freed. Raises StorageError, OSError."""
    gone = [row.part for row in rows if not row.keep]
    for part in gone:
        if part.place.folder is None:
            remove_set(part.place)
        else:
            shutil.rmtree(part.place.folder)
    return sum(part.bytes for part in gone)
