"""Attachments: files that episodes leave, each an object named by the sha256 of its content.

The same content is one object, so a worker that is killed and begins again writes the same. Readers check size and
sha256, so they never take a part for the whole. Nothing here deletes: docs/how-to/object-storage.md names the rule.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from schemas.ids import sha256_hex
from schemas.records import Attachment
from tentalis.service.settings import Settings
from tentalis.service.variables import LARGEST_ATTACHMENT
from tentalis.storage import objects
from tentalis.storage.errors import StorageError, StoredFileDamaged, StoredFileMissing
from tentalis.storage.location import Location


class AttachmentStore:
    """Writes attachments to a place. `limit`: most bytes of one."""

    def __init__(self, place: Location, limit: int) -> None:
        self._place = place
        self.limit = limit

    @classmethod
    def of(cls, settings: Settings) -> AttachmentStore | None:
        """Returns the store of the settings, None if they name none. Raises BadLocation."""
        if settings.attachments is None:
            return None
        return cls(Location.parse(settings.attachments), settings.attachment_bytes)

    def check(self) -> None:
        """Writes the empty object, to refuse a place that cannot be written. Raises StorageError, MissingExtra."""
        self._write(b"")

    def put(self, name: str, media_type: str, content: bytes) -> Attachment:
        """Stores a content and returns its attachment. Raises StorageError, and ValueError for more bytes than `limit`.

        An object that is there is written again: a rule that deletes by age then counts from the newest result.
        """
        if len(content) > self.limit:
            raise ValueError(f"{name} has {len(content):,} bytes, more than the limit of {self.limit:,}")
        place = self._write(content)
        return Attachment(name=name, media_type=media_type, sha256=place.name, bytes=len(content), url=place.url)

    def _write(self, content: bytes) -> Location:
        place = self._place / sha256_hex(content)
        if place.folder is None:
            objects.put_bytes(place, content)
            return place
        try:
            _write_file(place.folder, content)
        except OSError as error:
            raise StorageError(
                f"{place} cannot be written: {error.strerror or error}. Make room in the folder and let this process "
                "write to it"
            ) from error
        return place


def read_attachment(attachment: Attachment) -> bytes:
    """Returns the content of an attachment that has a URL. Raises BadLocation, StorageError, MissingExtra."""
    assert attachment.url is not None
    place = Location.parse(attachment.url)
    if attachment.bytes > LARGEST_ATTACHMENT:
        raise StoredFileDamaged(f"{place} has {attachment.bytes:,} bytes; the limit is {LARGEST_ATTACHMENT:,} bytes")
    found = _size(place)
    if found != attachment.bytes:
        raise StoredFileDamaged(f"{place} is damaged: it has {found:,} bytes, its result says {attachment.bytes:,}")
    content = objects.get_bytes(place) if place.folder is None else place.folder.read_bytes()
    sha256 = sha256_hex(content)
    if sha256 != attachment.sha256:
        raise StoredFileDamaged(f"{place} is damaged: it has sha256 {sha256}, its result says {attachment.sha256}")
    return content


def _size(place: Location) -> int:
    if place.folder is None:
        return objects.size_of(place)
    if not place.folder.is_file():
        raise StoredFileMissing(f"{place} is missing")
    return place.folder.stat().st_size


def _write_file(path: Path, content: bytes) -> None:
    """Writes a file such that it is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
