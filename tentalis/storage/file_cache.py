"""A local folder of bounded size for file sets that were fetched from an object store, named by their content.

Processes that share the folder lock it in turn: a set is not removed while another process reads it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tentalis.storage.errors import StoredFileDamaged, StoredFileMissing
from tentalis.storage.file_set import fetch_set, is_complete, read_manifest
from tentalis.storage.location import Location

log = logging.getLogger(__name__)


class FileCache:
    """File sets fetched from object stores, in a local folder of at most `limit` bytes. A set in use is kept even if
    it is larger."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    @contextmanager
    def opened(self, place: Location, sha256: dict[str, str]) -> Iterator[Path]:
        """Yields the local folder of the file set at `place`, fetched first if it is not cached. `sha256`: the files
        that the set must have, by name. Raises StorageError, OSError."""
        manifest = read_manifest(place)
        if manifest is None:
            raise StoredFileMissing(f"{place} has no manifest: it was deleted, or never written completely")
        for name, expected in sha256.items():
            if name not in manifest.files or manifest.files[name].sha256 != expected:
                raise StoredFileDamaged(f"{place}: its manifest does not name a {name} with sha256 {expected}")
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder / manifest.digest
        with self._locked():
            if folder.exists() and not is_complete(folder, manifest):
                log.warning("%s is damaged: it is fetched again", folder)
                shutil.rmtree(folder)
            if not folder.exists():
                fetch_set(place, manifest, folder)
            os.utime(folder)
            self._evict(folder)
            yield folder

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _evict(self, used: Path) -> None:
        """Removes the sets that were used longest ago, until the rest fits."""
        for leftover in self._folder.glob(".*.*"):
            shutil.rmtree(leftover)  # of a fetch that was killed: nobody else fetches now
        sizes = {path: _size(path) for path in self._folder.iterdir() if path.is_dir()}
        for path in sorted(sizes.keys() - {used}, key=lambda path: path.stat().st_mtime_ns):
            if sum(sizes.values()) <= self._limit:
                return
            shutil.rmtree(path)
            del sizes[path]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
