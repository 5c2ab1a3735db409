"""The adapters a server has loaded."""

import threading
from dataclasses import replace
from pathlib import Path

from tentalis.inference.lora import WEIGHTS_FILE, AdapterRefused, LoraAdapter
from tentalis.inference.runtime import ModelRuntime
from tentalis.storage.file_cache import FileCache
from tentalis.storage.location import Location, has_scheme


class AdapterCacheFull(Exception):
    """The server already has its maximum number of adapters."""


class AdapterCache:
    """The served adapters, by name. Loading reads the disk, or fetches to it, in the caller's thread, then swaps the
    entry atomically. `files`: where fetched adapters are kept."""

    def __init__(self, runtime: ModelRuntime, limit: int, files: FileCache) -> None:
        self._runtime = runtime
        self._files = files
        self._limit = limit
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._loaded: dict[str, LoraAdapter] = {}

    def load(self, name: str, path: str, sha256: str | None = None) -> LoraAdapter:
        """Load or replace `name` from a folder, or from a set of files in an object store; its weights must have this
        sha256. Raises AdapterRefused (lora.py), AdapterCacheFull, BadLocation, StorageError, MissingExtra."""
        with self._loading:
            if name not in self._loaded and len(self._loaded) >= self._limit:
                raise AdapterCacheFull(
                    f"{self._limit} adapters are loaded already; unload one first, or raise --max-adapters."
                )
            adapter = self._read(name, path, sha256)
            if sha256 is not None and adapter.sha256 != sha256:
                raise AdapterRefused(f"The weights in {path} have sha256 {adapter.sha256}, not {sha256}.")
            with self._lock:
                self._loaded = self._loaded | {name: adapter}
            return adapter

    def _read(self, name: str, path: str, sha256: str | None) -> LoraAdapter:
        place = Location.parse(path) if has_scheme(path) else None
        folder = Path(path) if place is None else place.folder
        if folder is not None:
            return self._runtime.load_adapter(name, folder)
        assert place is not None
        with self._files.opened(place, {} if sha256 is None else {WEIGHTS_FILE: sha256}) as fetched:
            return replace(self._runtime.load_adapter(name, fetched), path=place.url)

    def unload(self, name: str) -> LoraAdapter | None:
        """Stop serving `name`. Returns its adapter, None if not loaded. Requests in flight finish with it."""
        with self._lock:
            adapter = self._loaded.get(name)
            self._loaded = {key: value for key, value in self._loaded.items() if key != name}
            return adapter

    def get(self, name: str) -> LoraAdapter | None:
        """The adapter now served as `name`."""
        return self._loaded.get(name)

    def all(self) -> list[LoraAdapter]:
        """All adapters, in the order they were first loaded."""
        return list(self._loaded.values())
