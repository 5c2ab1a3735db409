"""Sets of files in an object store: complete or absent.

    write: content -> manifest          delete: manifest -> content

An object store cannot rename, so the manifest is the commit point. Readers look only at what a manifest names, and
check the sha256 of every file that they read.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from schemas.ids import sha256_hex
from tentalis.storage import objects
from tentalis.storage.errors import StoredFileDamaged, StoredFileMissing
from tentalis.storage.location import Location
from tentalis.storage.manifest import MANIFEST_FILE, SetManifest, StoredFile
from tentalis.storage.objects import StoredObject

log = logging.getLogger(__name__)

LEFTOVER_AGE_S = 86_400.0


def write_set(place: Location, folder: Path, names: Collection[str]) -> SetManifest:
    """Writes files of a local folder to the object store, as the file set at `place`, and returns its manifest. If
    the set at `place` is intact and has the same content, nothing is written. Raises StorageError, OSError."""
    manifest = SetManifest.of({name: _stored_file(folder / name) for name in names})
    if _is_intact(place, manifest):
        return manifest
    content = place / manifest.folder
    for name in manifest.files:
        objects.put_file(content / name, folder / name)
    objects.put_bytes(place / MANIFEST_FILE, manifest.encoded())
    return manifest


def read_manifest(place: Location) -> SetManifest | None:
    """Returns the manifest of a set, None if there is no such set. Raises StorageError."""
    try:
        data = objects.get_bytes(place / MANIFEST_FILE)
    except StoredFileMissing:
        return None
    return SetManifest.parse(data, f"{place / MANIFEST_FILE}")


def read_file(place: Location, manifest: SetManifest, name: str) -> bytes:
    """Returns the content of a file of a set. Raises StorageError."""
    if name not in manifest.files:
        raise StoredFileMissing(f"{place} has no {name}: its manifest names {', '.join(manifest.files)}")
    file = place / manifest.folder / name
    data = objects.get_bytes(file)
    _check(file, manifest.files[name], sha256_hex(data))
    return data


def fetch_set(place: Location, manifest: SetManifest, folder: Path) -> None:
    """Copies a set to a new local folder, which then has all its files or does not exist; a folder that is there is
    kept. Raises StorageError, OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        for name, stored in manifest.files.items():
            objects.get_file(place / manifest.folder / name, temporary / name)
            _check(place / manifest.folder / name, stored, _stored_file(temporary / name).sha256)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has fetched it meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_complete(folder: Path, manifest: SetManifest) -> bool:
    """True if a local folder has the files of a manifest, with their sha256. Raises OSError for files that cannot be
    read."""
    return all(
        (folder / name).is_file() and _stored_file(folder / name) == file for name, file in manifest.files.items()
    )


@dataclass(frozen=True, slots=True)
class SetListing:
    """The contents of a location: `sets` with the bytes of their objects, and `leftovers`, the old objects of
    sets that were never completed, or not deleted completely."""

    sets: dict[str, int]
    leftovers: list[str]


def list_sets(parent: Location) -> SetListing:
    """Lists the sets directly below a location. Raises StorageError."""
    found: dict[str, list[StoredObject]] = {}
    for each in objects.objects_below(parent):
        name, slash, _ = each.key.partition("/")
        if slash:
            found.setdefault(name, []).append(each)
    committed = {name for name, each in found.items() if any(one.key == f"{name}/{MANIFEST_FILE}" for one in each)}
    # The age keeps a process that was frozen in between from deleting what its successor writes.
    oldest = time.time() - LEFTOVER_AGE_S
    return SetListing(
        {name: sum(one.bytes for one in found[name]) for name in sorted(committed)},
        [one.key for name in sorted(found.keys() - committed) for one in found[name] if one.modified < oldest],
    )


def remove_set(place: Location) -> None:
    """Deletes a set, its manifest first. Raises StorageError."""
    objects.delete_object(place / MANIFEST_FILE)
    objects.delete_objects(place, [each.key for each in objects.objects_below(place)])


def _is_intact(place: Location, manifest: SetManifest) -> bool:
    """True if the set at `place` has this manifest, and its content is intact. Logs the damage that it finds."""
    try:
        if read_manifest(place) != manifest:
            return False
        for name in manifest.files:
            read_file(place, manifest, name)
    except (StoredFileDamaged, StoredFileMissing) as error:
        log.warning("%s. It is written again", error)
        return False
    return True


def _stored_file(path: Path) -> StoredFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return StoredFile(sha256=digest.hexdigest(), bytes=path.stat().st_size)


def _check(file: Location, stored: StoredFile, sha256: str) -> None:
    if sha256 != stored.sha256:
        raise StoredFileDamaged(
            f"{file} is damaged: it has sha256 {sha256}, its manifest says {stored.sha256}. Delete {MANIFEST_FILE} of "
            "the set, and it is written again if it is the newest of its run"
        )
