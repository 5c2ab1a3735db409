"""The manifest of a set of files: their names and sha256, and the folder of their objects. Pure.

The folder is named by a digest of its content, so that writers of different content under one name never touch each
other's objects, and the manifest that is written last decides for all files together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.ids import sha256_hex
from tentalis.storage.errors import StoredFileDamaged

MANIFEST_FILE = "manifest.json"
FORMAT = 1
_FOLDER_DIGITS = 16

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredFile(BaseModel):
    """A file of a set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Sha256
    bytes: Annotated[int, Field(ge=0)]


class SetManifest(BaseModel):
    """The files of a set. `digest`: sha256 over the names and hashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    files: dict[FileName, StoredFile]
    digest: Sha256

    @classmethod
    def of(cls, files: Mapping[str, StoredFile]) -> SetManifest:
        """Makes the manifest of these files. Raises ValidationError for a name that is a path."""
        return cls(files=dict(sorted(files.items())), digest=_digest(files))

    @classmethod
    def parse(cls, data: bytes, url: str) -> SetManifest:
        """Reads a manifest. Raises StoredFileDamaged, with `url` in the message."""
        try:
            manifest = cls.model_validate_json(data)
        except ValidationError as error:
            raise StoredFileDamaged(f"{url} is not a manifest of this version: {error.errors()[0]['msg']}") from error
        if manifest.format != FORMAT or manifest.digest != _digest(manifest.files):
            raise StoredFileDamaged(f"{url} is damaged, or of another version: it does not match its own digest")
        return manifest

    @property
    def folder(self) -> str:
        """The name of the folder of the objects."""
        return self.digest[:_FOLDER_DIGITS]

    def encoded(self) -> bytes:
        """Returns the content of the manifest's object."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def _digest(files: Mapping[str, StoredFile]) -> str:
    return sha256_hex(json.dumps({name: file.sha256 for name, file in files.items()}, sort_keys=True).encode())
