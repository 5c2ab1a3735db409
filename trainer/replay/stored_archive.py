"""Archives of runs in an object store, as sets of files: written locally first, then uploaded."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tentalis.service.settings import Settings
from tentalis.storage.file_set import fetch_set, read_file, read_manifest, write_set
from tentalis.storage.location import Location
from trainer.replay.archive import INDEX_FILE, BadArchive, ExportedRun, archived_run_id, export_run


def export_to(run_id: str, settings: Settings, place: Location, *, allow_missing: bool = False) -> ExportedRun:
    """Writes a run's archive to a place; see `export_run`. Raises its errors and StorageError."""
    if place.folder is not None:
        return export_run(run_id, settings, place.folder, allow_missing=allow_missing)
    existing = read_manifest(place)
    if existing is not None and archived_run_id(read_file(place, existing, INDEX_FILE)) != run_id:
        raise BadArchive(f"{place} holds something other than the archive of run {run_id}: name another --into")
    with tempfile.TemporaryDirectory(prefix="tentalis-export-") as folder:
        done = export_run(run_id, settings, Path(folder), allow_missing=allow_missing)
        write_set(place, Path(folder), [*done.files, INDEX_FILE])
    return replace(done, folder=place)


@contextmanager
def archive_folder(place: Location) -> Iterator[Path]:
    """Gives a folder with the archive at a place. Raises BadArchive, StorageError, OSError."""
    if place.folder is not None:
        yield place.folder
        return
    manifest = read_manifest(place)
    if manifest is None:
        raise BadArchive(f"{place} has no archive: its manifest is missing")
    with tempfile.TemporaryDirectory(prefix="tentalis-import-") as folder:
        fetch_set(place, manifest, Path(folder) / "archive")
        yield Path(folder) / "archive"
