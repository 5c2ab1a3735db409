"""The versions a server has loaded: adapters, and whole models of its model's shape."""

import threading
from dataclasses import replace
from pathlib import Path

from tentalis.inference.lora import AdapterRefused
from tentalis.inference.runtime import ModelRuntime
from tentalis.inference.whole_model import ServedVersion, WholeModel, is_whole_model
from tentalis.storage.file_cache import FileCache
from tentalis.storage.file_set import read_manifest
from tentalis.storage.location import Location, has_scheme
from tentalis.storage.version_files import ADAPTER_WEIGHTS, MODEL_WEIGHTS

DEFAULT_MODELS = 8


class AdapterCacheFull(Exception):
    """The server already has its maximum number of adapters or of whole models."""


class AdapterCache:
    """The served adapters, by name. Loading reads the disk, or fetches to it, in the caller's thread, then swaps the
    entry atomically. `files`: where fetched adapters are kept. `model_limit`: most whole models; each has the size of
    the served model."""

    def __init__(self, runtime: ModelRuntime, limit: int, files: FileCache, model_limit: int = DEFAULT_MODELS) -> None:
        self._runtime = runtime
        self._files = files
        self._limit, self._model_limit = limit, model_limit
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._loaded: dict[str, ServedVersion] = {}

    def load(self, name: str, path: str, sha256: str | None = None) -> ServedVersion:
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

    def _read(self, name: str, path: str, sha256: str | None) -> ServedVersion:
        place = Location.parse(path) if has_scheme(path) else None
        folder = Path(path) if place is None else place.folder
        if folder is not None:
            return self._read_folder(name, folder)
        assert place is not None
        with self._files.opened(place, _expected(place, sha256)) as fetched:
            return replace(self._read_folder(name, fetched), path=place.url)

    def _read_folder(self, name: str, folder: Path) -> ServedVersion:
        models = [loaded for loaded in self._loaded.values() if isinstance(loaded, WholeModel) and loaded.name != name]
        if is_whole_model(folder) and len(models) >= self._model_limit:
            raise AdapterCacheFull(
                f"{self._model_limit} whole models are loaded already, each of the served model's size; unload one "
                "first, or raise --max-models."
            )
        return self._runtime.load_version(name, folder)

    def unload(self, name: str) -> ServedVersion | None:
        """Stop serving `name`. Returns its adapter, None if not loaded. Requests in flight finish with it."""
        with self._lock:
            adapter = self._loaded.get(name)
            self._loaded = {key: value for key, value in self._loaded.items() if key != name}
            return adapter

    def get(self, name: str) -> ServedVersion | None:
        """The adapter now served as `name`."""
        return self._loaded.get(name)

    def all(self) -> list[ServedVersion]:
        """All adapters, in the order they were first loaded."""
        return list(self._loaded.values())


def _expected(place: Location, sha256: str | None) -> dict[str, str]:
    """The file that a set must have, with its sha256 if that is known: the weights of an adapter or, if it has some, of
    a whole model. Raises StorageError."""
    if sha256 is None:
        return {}
    manifest = read_manifest(place)
    is_model = manifest is not None and MODEL_WEIGHTS in manifest.files
    return {MODEL_WEIGHTS if is_model else ADAPTER_WEIGHTS: sha256}
