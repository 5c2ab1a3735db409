"""Objects of a store, through fsspec: put, get, list, delete. Every error of the store is a StorageError.

The client libraries retry a request that fails for a while: S3 as AWS_RETRY_MODE and AWS_MAX_ATTEMPTS say, five
attempts by default. Nothing is tried again above them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from tentalis.service.packages import require
from tentalis.storage.errors import store_error
from tentalis.storage.location import EXTRAS, Location

PART_BYTES = 64 * 2**20
"""Larger objects of S3 are uploaded in parts of this size."""
_PARTS = {"s3": {"chunksize": PART_BYTES}, "gs": {}}
_OPTIONS = {"s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}, "gs": {}}


@lru_cache(maxsize=4)
def _file_system(scheme: str) -> Any:
    require(f"a location that begins with {scheme}://", EXTRAS[scheme])
    if scheme == "gs":
        # fsspec's choice for gs first asks by gRPC for the kind of the bucket: a minute for each operation, where a
        # network lets only HTTP through.
        from gcsfs.core import GCSFileSystem as FileSystem
    else:
        from s3fs import S3FileSystem as FileSystem
    # Listings are never kept: other processes write and delete.
    return FileSystem(use_listings_cache=False, skip_instance_cache=True, **_OPTIONS[scheme])


@contextmanager
def _told(location: Location) -> Iterator[None]:
    """Turns errors of the client library into a StorageError."""
    try:
        yield
    except Exception as error:
        told = store_error(error, location.url)
        if told is None:
            raise
        raise told from error


def put_bytes(location: Location, data: bytes) -> None:
    """Writes an object. Raises StorageError."""
    with _told(location):
        _file_system(location.scheme).pipe_file(location.url, data)


def put_file(location: Location, path: Path) -> None:
    """Writes an object from a file; a large one in parts. Raises StorageError, OSError of the file."""
    with _told(location):
        _file_system(location.scheme).put_file(str(path), location.url, **_PARTS[location.scheme])


def get_bytes(location: Location) -> bytes:
    """Returns the content of an object. Raises StorageError."""
    with _told(location):
        data: bytes = _file_system(location.scheme).cat_file(location.url)
        return data


def size_of(location: Location) -> int:
    """Returns the size of an object in bytes. Raises StorageError."""
    with _told(location):
        return int(_file_system(location.scheme).info(location.url)["size"])


def get_file(location: Location, path: Path) -> None:
    """Copies an object to a file. Raises StorageError, OSError of the file."""
    with _told(location):
        _file_system(location.scheme).get_file(location.url, str(path))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its key below the listed location, its size, and when it was written, in seconds since 1970."""

    key: str
    bytes: int
    modified: float


def objects_below(location: Location) -> list[StoredObject]:
    """Returns the objects below a location. Raises StorageError."""
    with _told(location):
        found = _file_system(location.scheme).find(location.url, detail=True)
    start = len(location.url.partition("://")[2]) + 1
    return [
        StoredObject(str(key)[start:], int(entry["size"]), _modified(entry)) for key, entry in sorted(found.items())
    ]


def _modified(entry: Mapping[str, Any]) -> float:
    """The time that s3fs gives as `LastModified`, and gcsfs as `mtime`."""
    at: datetime = entry["LastModified"] if "LastModified" in entry else entry["mtime"]
    return at.timestamp()


def delete_object(location: Location) -> None:
    """Deletes an object. Raises StorageError."""
    with _told(location):
        _file_system(location.scheme).rm_file(location.url)


def delete_objects(location: Location, keys: Collection[str]) -> None:
    """Deletes objects below a location. Raises StorageError."""
    if keys:
        with _told(location):
            _file_system(location.scheme).rm([f"{location.url}/{key}" for key in keys])
