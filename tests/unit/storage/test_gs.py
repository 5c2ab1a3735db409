"""Sets of files in Google Cloud Storage, on a real server of its API: complete or absent, verified at every reading."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.storage import objects
from tentalis.storage.errors import StorageError, StoreDenied, StoredFileDamaged, StoredFileMissing
from tentalis.storage.file_cache import FileCache
from tentalis.storage.file_set import fetch_set, list_sets, read_file, read_manifest, remove_set, write_set
from tentalis.storage.location import Location
from tests.support.gcs_server import GcsServer, gcs_server


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


@pytest.fixture
def place(server: GcsServer) -> Location:
    server.uploads.clear()
    server.deny = 0
    return Location.parse(server.bucket()) / "adapters" / "assistant" / "v1"


def folder_of(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir()
    (path / "weights").write_bytes(weights)
    (path / "config").write_bytes(b"{}")
    return path


def content(place: Location, into: Path) -> dict[str, bytes]:
    """The set, as a reader fetches it."""
    manifest = read_manifest(place)
    assert manifest is not None
    fetch_set(place, manifest, into)
    return {path.name: path.read_bytes() for path in into.iterdir()}


def test_a_set_is_written_listed_fetched_and_removed(place: Location, tmp_path: Path) -> None:
    write_set(place, folder_of(tmp_path / "a"), ["weights", "config"])
    parent = Location.parse(place.url.rpartition("/")[0])
    assert content(place, tmp_path / "b") == {"weights": b"weights", "config": b"{}"}
    assert list(list_sets(parent).sets) == ["v1"] and list_sets(parent).leftovers == []
    with FileCache(tmp_path / "cache", 1000).opened(place, {}) as folder:
        assert (folder / "weights").read_bytes() == b"weights"
    remove_set(place)
    assert read_manifest(place) is None and objects.objects_below(parent) == []


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_write_that_is_cut_leaves_what_was_there_before(
    server: GcsServer, place: Location, tmp_path: Path, cut: int
) -> None:
    old, new = folder_of(tmp_path / "old"), folder_of(tmp_path / "new", b"other weights")
    before = Location.parse(f"{place.url}-before")
    write_set(before, old, ["weights", "config"])
    for target, kept in ((place, None), (before, b"weights")):
        server.uploads.clear()
        server.deny = cut
        with pytest.raises(StoreDenied, match="denies access"):
            write_set(target, new, ["weights", "config"])
        if kept is None:
            assert read_manifest(target) is None
        else:
            assert content(target, tmp_path / "seen")["weights"] == kept
        server.deny = 0
        write_set(target, new, ["weights", "config"])
        assert content(target, tmp_path / f"after-{target.name}")["weights"] == b"other weights"


def test_a_large_file_goes_in_parts_and_one_that_fails_leaves_nothing(
    server: GcsServer, place: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects._PARTS, "gs", {"chunksize": 5 * 2**20})
    large = folder_of(tmp_path / "a", bytes(range(256)) * 44_000)
    server.deny = 4  # the config, the beginning of the upload, a part
    with pytest.raises(StoreDenied):
        write_set(place, large, ["weights", "config"])
    assert len(server.uploads) == 4 and read_manifest(place) is None
    assert not [each for each in objects.objects_below(place) if each.key.endswith("/weights")]
    server.deny = 0
    write_set(place, large, ["weights", "config"])
    assert content(place, tmp_path / "b")["weights"] == (large / "weights").read_bytes()


def test_damage_is_found_and_mended(place: Location, tmp_path: Path) -> None:
    manifest = write_set(place, folder_of(tmp_path / "a"), ["weights", "config"])
    weights = Location.parse(f"{place}/{manifest.folder}/weights")
    for damage in (b"weightz", b"weight", None):
        if damage is None:
            objects.delete_object(weights)
        else:
            objects.put_bytes(weights, damage)
        with pytest.raises((StoredFileDamaged, StoredFileMissing)):
            read_file(place, manifest, "weights")
        with pytest.raises((StoredFileDamaged, StoredFileMissing)):
            fetch_set(place, manifest, tmp_path / "b")
        assert not (tmp_path / "b").exists(), "nothing half-fetched stays"
        write_set(place, tmp_path / "a", ["weights", "config"])
        assert read_file(place, manifest, "weights") == b"weights"


def test_a_bucket_that_does_not_exist_is_said(server: GcsServer, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gs://no-such-bucket"):
        write_set(Location.parse("gs://no-such-bucket/v1"), folder_of(tmp_path / "a"), ["weights", "config"])
