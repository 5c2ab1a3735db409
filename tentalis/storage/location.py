"""Locations of files: a folder of this machine, or a prefix in an object store. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

EXTRAS = {"s3": "s3", "gs": "gs"}
"""The schemes of object stores, each with the extra of the package that it needs."""
ALLOWED = "a file:///... URL of this machine, an absolute path, s3://bucket/prefix or gs://bucket/prefix"

_SCHEME = re.compile(r"file:|[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]+")


class BadLocation(ValueError):
    """A text that is not a location; the message names the forms that are."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place of files. `url` has no slash at its end."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Location:
        """Returns the location that a URL or an absolute path names. Raises BadLocation."""
        if text.startswith("/"):
            return cls.of_folder(Path(text))
        url = urlsplit(text)
        if url.scheme == "file" and url.netloc in ("", "localhost") and url.path.startswith("/"):
            return cls.of_folder(Path(unquote(url.path)))
        # The keys of an object store are taken as they are: nothing in them is quoted.
        bucket, _, prefix = text.partition("://")[2].partition("/")
        if url.scheme not in EXTRAS or not _BUCKET.fullmatch(bucket) or {".", ".."} & set(prefix.split("/")):
            raise BadLocation(f"location {text!r} is not supported: it must be {ALLOWED}")
        return cls(text.rstrip("/"))

    @classmethod
    def given(cls, text: str) -> Location:
        """Returns the location that a person gives: a URL, or a path, which may be relative. Raises BadLocation."""
        return cls.parse(text) if has_scheme(text) else cls.of_folder(Path(text).expanduser())

    @classmethod
    def of_folder(cls, folder: Path) -> Location:
        """The location of a folder of this machine."""
        return cls(folder.absolute().as_uri())

    @property
    def scheme(self) -> str:
        """`file`, `s3` or `gs`."""
        return self.url.partition(":")[0]

    @property
    def folder(self) -> Path | None:
        """The folder, None for a place in an object store."""
        return Path(unquote(urlsplit(self.url).path)) if self.scheme == "file" else None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> Location:
        """The location below this one."""
        return Location.of_folder(self.folder / name) if self.folder is not None else Location(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url if self.folder is None else str(self.folder)


def has_scheme(text: str) -> bool:
    """True for a URL, False for a path."""
    return _SCHEME.match(text) is not None
