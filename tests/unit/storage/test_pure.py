"""Locations, manifests, and the words for a store's errors, without a store."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.service.error_messages import EXIT_CODES
from tentalis.service.settings import Settings
from tentalis.storage import errors
from tentalis.storage.errors import (
    NoSuchBucket,
    StorageError,
    StoreDenied,
    StoredFileDamaged,
    StoredFileMissing,
    StoreFull,
    StoreUnreachable,
    store_error,
)
from tentalis.storage.location import BadLocation, Location, has_scheme
from tentalis.storage.manifest import SetManifest, StoredFile
from tentalis.storage.places import adapter_location, checkpoints_location


def test_a_location_is_a_folder_or_a_prefix_in_an_object_store(tmp_path: Path) -> None:
    folder = tmp_path / "an adapter"
    for text in (str(folder), folder.as_uri(), folder.as_uri().replace("file://", "file://localhost")):
        place = Location.parse(text)
        assert (place.folder, place.url) == (folder, folder.as_uri())
        assert (place / "v1").folder == folder / "v1"
    stored = Location.parse("s3://bucket/some prefix/a%20b/")
    assert stored.folder is None and stored.scheme == "s3" and stored.name == "a%20b"
    assert str(stored / "v1") == "s3://bucket/some prefix/a%20b/v1", "keys are not quoted"
    assert str(Location.parse("gs://bucket") / "v1") == "gs://bucket/v1"
    bad = ("", "relative/path", "https://host/a", "file://host/a", "file:relative", "s3://", "s3:///a", "s3://b/../c")
    for text in bad:
        with pytest.raises(BadLocation, match=r"s3://bucket/prefix or gs://bucket/prefix"):
            Location.parse(text)
    assert [has_scheme(text) for text in ("s3://b/a", "file:/a", "https://h", "/a:b", "a:b/c")] == [True] * 3 + [
        False
    ] * 2


def test_places_follow_the_settings(tmp_path: Path) -> None:
    home = Settings(home=tmp_path)
    assert adapter_location(home, "assistant", 3).folder == tmp_path / "adapters" / "assistant" / "v3"
    away = home.model_copy(update={"store": "s3://bucket/team/"})
    assert adapter_location(away, "assistant", 3).url == "s3://bucket/team/adapters/assistant/v3"
    assert checkpoints_location(away, "run-1").url == "s3://bucket/team/checkpoints/run-1"
    share = home.model_copy(update={"store": (tmp_path / "share").as_uri()})
    assert checkpoints_location(share, "run-1").folder == tmp_path / "share" / "checkpoints" / "run-1"


def test_a_manifest_names_its_content_and_knows_damage() -> None:
    files = {"w": StoredFile(sha256="a" * 64, bytes=1), "c": StoredFile(sha256="b" * 64, bytes=2)}
    manifest = SetManifest.of(files)
    assert SetManifest.parse(manifest.encoded(), "u") == manifest == SetManifest.of(dict(reversed(files.items())))
    other = SetManifest.of(files | {"w": StoredFile(sha256="c" * 64, bytes=1)})
    assert other.folder != manifest.folder, "writers of different content do not share objects"
    changed = manifest.encoded().replace(b"a" * 64, b"c" * 64)
    for data in (
        b"",
        b"{}",
        manifest.encoded()[:-10],
        changed,
        manifest.encoded().replace(b'"format": 1', b'"format": 2'),
    ):
        with pytest.raises(StoredFileDamaged, match="u is"):
            SetManifest.parse(data, "u")
    with pytest.raises(ValueError, match="pattern"):
        SetManifest.of({"../w": files["w"]})


class Answer(Exception):
    """An error as client libraries raise it: botocore with a response, gcsfs with a code."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"{code} was said")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int) -> None:
        super().__init__("said")
        self.code = code


class EndpointConnectionError(Exception):
    """As botocore raises it."""


class NoCredentialsError(Exception):
    """As botocore raises it."""


def in_the_place_of(outer: Exception, inner: Exception) -> Exception:
    """An error that was raised while another one was handled."""
    outer.__context__ = inner
    return outer


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (caused(PermissionError("x"), Answer("QuotaExceeded", 403)), StoreFull, "Raise its quota"),
        (caused(OSError("x"), Answer("XMinioStorageFull", 507)), StoreFull, "the bucket is full"),
        (Answer("InsufficientStorage", 507), StoreFull, "InsufficientStorage was said"),
        (caused(PermissionError("x"), Answer("AccessDenied", 403)), StoreDenied, "denies access"),
        (caused(PermissionError("x"), Answer("403", 403)), StoreDenied, "permissions"),
        (NoCredentialsError(), StoreDenied, "AWS_PROFILE"),
        (HttpError(401), StoreDenied, "credentials"),
        (caused(FileNotFoundError("x"), Answer("NoSuchBucket", 404)), NoSuchBucket, "Create it"),
        (caused(FileNotFoundError("x"), Answer("NoSuchKey", 404)), StoredFileMissing, "is missing"),
        (FileNotFoundError("x"), StoredFileMissing, "is missing"),
        (caused(OSError("x"), Answer("SlowDown", 503)), StoreUnreachable, "overloaded"),
        (caused(OSError("x"), Answer("InternalError", 500)), StoreUnreachable, "AWS_ENDPOINT_URL_S3"),
        (HttpError(503), StoreUnreachable, "does not answer"),
        (OSError("Forbidden: http://x/b/k"), StoreDenied, "denies access"),
        (in_the_place_of(HttpError(499), OSError("Forbidden: http://x")), StoreDenied, "Forbidden: http://x"),
        (EndpointConnectionError("refused"), StoreUnreachable, "refused"),
        (TimeoutError(), StoreUnreachable, "TimeoutError"),
    ],
)
def test_errors_in_words(error: Exception, kind: type[StorageError], words: str) -> None:
    found = store_error(error, "s3://b/k")
    assert type(found) is kind and words in str(found) and str(found).startswith("s3://b/k")


def test_errors_that_are_not_the_stores_stay_as_they_are() -> None:
    assert store_error(ValueError("a bug"), "s3://b/k") is None
    assert store_error(Answer("InvalidArgument", 400), "s3://b/k") is None
    assert store_error(in_the_place_of(ValueError("a bug"), OSError("Forbidden: x")), "s3://b/k") is None
    assert store_error(OSError("No space left on device"), "s3://b/k") is None


def test_a_process_ends_with_the_code_of_the_table() -> None:
    kinds: list[Any] = [NoSuchBucket, StoreDenied, StoreFull, StoreUnreachable]
    assert {f"{errors.__name__}.{kind.__name__}": kind.exit_code for kind in kinds}.items() <= EXIT_CODES.items()
