"""The adapters a server has loaded."""

import threading
from pathlib import Path

from tentalis.inference.lora import Adapter
from tentalis.inference.runtime import Runtime


class ShelfFull(Exception):
    """As many adapters are loaded as the server was started for."""


class Adapters:
    """The adapters that are served, by name. Loading reads the disk in the caller's thread and swaps the entry at
    once."""

    def __init__(self, runtime: Runtime, limit: int) -> None:
        self._runtime = runtime
        self._limit = limit
        self._lock = threading.Lock()
        self._loaded: dict[str, Adapter] = {}

    def load(self, name: str, folder: Path) -> Adapter:
        """Load or replace `name`. Raises AdapterRefused (lora.py), ShelfFull."""
        with self._lock:
            if name not in self._loaded and len(self._loaded) >= self._limit:
                raise ShelfFull(
                    f"{self._limit} adapters are loaded already; unload one first, or raise --max-adapters."
                )
            adapter = self._runtime.load_adapter(name, folder)
            self._loaded = self._loaded | {name: adapter}
            return adapter

    def unload(self, name: str) -> Adapter | None:
        """Stop serving `name`; None when it was not loaded. Answers in flight keep their adapter to the end."""
        with self._lock:
            adapter = self._loaded.get(name)
            self._loaded = {key: value for key, value in self._loaded.items() if key != name}
            return adapter

    def get(self, name: str) -> Adapter | None:
        """The adapter now served as `name`."""
        return self._loaded.get(name)

    def all(self) -> list[Adapter]:
        """All adapters, in the order they were first loaded."""
        return list(self._loaded.values())
