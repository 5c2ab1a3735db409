"""The places of checkpoints and adapters, by the settings: below TENTALIS_STORE, else below TENTALIS_HOME."""

from __future__ import annotations

from tentalis.service.settings import Settings
from tentalis.storage.file_cache import FileCache
from tentalis.storage.location import Location


def store_location(settings: Settings) -> Location:
    """The place of the store. Raises BadLocation."""
    return Location.of_folder(settings.home) if settings.store is None else Location.parse(settings.store)


def adapters_location(settings: Settings, policy: str) -> Location:
    """The place of a policy's adapters, of which each version has its own. Raises BadLocation."""
    return store_location(settings) / "adapters" / policy


def adapter_location(settings: Settings, policy: str, version: int) -> Location:
    """The place from which servers load an adapter. Raises BadLocation."""
    return adapters_location(settings, policy) / f"v{version}"


def checkpoints_location(settings: Settings, run_id: str) -> Location:
    """The place of a run's checkpoints. Raises BadLocation."""
    return store_location(settings) / "checkpoints" / run_id


def adapter_cache(settings: Settings) -> FileCache:
    """The folder of adapters that were fetched from an object store."""
    return FileCache(settings.cache / "adapters", settings.store_cache_bytes)
