"""Files of episodes on a real server of S3 and in a folder: named by their content, whole or refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.ids import sha256_hex
from schemas.records import Attachment
from tentalis.service.settings import Settings
from tentalis.service.variable import BadVariable
from tentalis.storage.attachments import AttachmentStore, read_attachment
from tentalis.storage.errors import (
    NoSuchBucket,
    StorageError,
    StoreDenied,
    StoredFileDamaged,
    StoredFileMissing,
    StoreFull,
    StoreUnreachable,
)
from tentalis.storage.location import Location
from tests.support.object_store import DENIED, FULL, UNAVAILABLE, Fault, ObjectStore, environment_of, object_store

PATCH = "diff --git a/é b/é\n".encode()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as found, environment_of(found):
        yield found


@pytest.fixture
def place(server: ObjectStore) -> Iterator[Location]:
    yield Location.parse(server.bucket()) / "episodes"
    server.faults.clear()


def put(place: Location, content: bytes = PATCH, limit: int = 1000) -> Attachment:
    return AttachmentStore(place, limit).put("patch.diff", "text/x-diff", content)


def test_an_object_is_named_by_its_content_and_read_from_its_url(server: ObjectStore, place: Location) -> None:
    AttachmentStore(place, 1000).check()
    made = put(place)
    assert made == Attachment(
        name="patch.diff",
        media_type="text/x-diff",
        sha256=sha256_hex(PATCH),
        bytes=len(PATCH),
        url=f"{place.url}/{sha256_hex(PATCH)}",
    )
    assert put(place) == made, "the same content is the same object"
    assert sorted(server.keys(place.url)) == sorted([sha256_hex(b""), sha256_hex(PATCH)])
    assert read_attachment(made) == PATCH
    with pytest.raises(ValueError, match="more than the limit of 3"):
        put(place, limit=3)


@pytest.mark.parametrize("damage", [b"", PATCH[:-1], PATCH + b"\n", b"x" * len(PATCH), None])
def test_a_part_is_never_taken_for_the_whole(server: ObjectStore, place: Location, damage: bytes | None) -> None:
    made = put(place)
    assert made.url is not None
    if damage is None:
        bucket, _, key = made.url.removeprefix("s3://").partition("/")
        server.client().delete_object(Bucket=bucket, Key=key)
    else:
        server.put(made.url, damage)
    with pytest.raises(StoredFileMissing if damage is None else StoredFileDamaged, match=made.sha256):
        read_attachment(made)
    assert read_attachment(put(place)) == PATCH, "the next write mends it"


def test_what_a_store_refuses_is_said(server: ObjectStore, place: Location) -> None:
    for answer, error in ((FULL, StoreFull), (DENIED, StoreDenied), (UNAVAILABLE, StoreUnreachable)):
        server.faults = [Fault(answer, "PUT")]
        with pytest.raises(error):
            AttachmentStore(place, 1000).check()
        assert server.keys(place.url) == []
    server.faults.clear()
    with pytest.raises(NoSuchBucket):
        AttachmentStore(Location.parse("s3://no-such-bucket/a"), 1000).check()


def test_a_folder_has_whole_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Location.of_folder(tmp_path / "left")
    made = put(place)
    assert read_attachment(made) == PATCH and [each.name for each in (tmp_path / "left").iterdir()] == [made.sha256]
    (tmp_path / "left" / made.sha256).write_bytes(PATCH[:5])
    with pytest.raises(StoredFileDamaged, match="has 5 bytes"):
        read_attachment(made)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        put(place, b"other")
    assert [each.name for each in (tmp_path / "left").iterdir()] == [made.sha256]
    (tmp_path / "left" / made.sha256).unlink()
    with pytest.raises(StoredFileMissing):
        read_attachment(made)


def test_a_record_cannot_make_a_reader_take_everything(tmp_path: Path) -> None:
    """A result names the place and the size, and whoever wrote it may lie."""
    endless = Attachment(name="a", media_type="b", sha256="c", bytes=0, url="file:///dev/zero")
    with pytest.raises(StoredFileMissing):
        read_attachment(endless)
    with pytest.raises(StoredFileDamaged, match="the limit is"):
        read_attachment(endless.model_copy(update={"bytes": 2**40, "url": Location.of_folder(tmp_path).url}))


def test_the_settings_name_the_store() -> None:
    assert AttachmentStore.of(Settings.from_env({})) is None
    found = AttachmentStore.of(
        Settings.from_env({"TENTALIS_ATTACHMENTS": "/mnt/left", "TENTALIS_ATTACHMENT_BYTES": "7"})
    )
    assert found is not None and found.limit == 7
    with pytest.raises(BadVariable, match="TENTALIS_ATTACHMENTS"):
        Settings.from_env({"TENTALIS_ATTACHMENTS": "ftp://left"})
