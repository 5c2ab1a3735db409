"""Sets of files on a real server of S3: complete or absent at every cut, verified at every reading."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.storage import file_set, objects
from tentalis.storage.errors import (
    NoSuchBucket,
    StoreDenied,
    StoredFileDamaged,
    StoredFileMissing,
    StoreFull,
    StoreUnreachable,
)
from tentalis.storage.file_cache import FileCache
from tentalis.storage.file_set import fetch_set, list_sets, read_file, read_manifest, remove_set, write_set
from tentalis.storage.location import Location
from tentalis.storage.manifest import SetManifest
from tests.support.object_store import (
    DENIED,
    FULL,
    OVERLOADED,
    UNAVAILABLE,
    Fault,
    ObjectStore,
    environment_of,
    object_store,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as found, environment_of(found):
        yield found


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    server.requests.clear()
    yield server
    server.faults.clear()


@pytest.fixture
def place(store: ObjectStore) -> Location:
    return Location.parse(store.bucket()) / "adapters" / "assistant" / "v1"


def folder_of(path: Path, weights: bytes = b"weights", config: bytes = b"{}") -> Path:
    path.mkdir()
    (path / "weights").write_bytes(weights)
    (path / "config").write_bytes(config)
    return path


def write(place: Location, folder: Path) -> SetManifest:
    return write_set(place, folder, ["weights", "config"])


def content(place: Location, into: Path) -> dict[str, bytes]:
    """The set, as a reader fetches it."""
    manifest = read_manifest(place)
    assert manifest is not None
    fetch_set(place, manifest, into)
    return {path.name: path.read_bytes() for path in into.iterdir()}


def test_content_is_written_first_and_the_manifest_deleted_first(
    store: ObjectStore, place: Location, tmp_path: Path
) -> None:
    write(place, folder_of(tmp_path / "a"))
    written = [
        request.rpartition("/")[2] for request in store.requests if request.startswith("PUT") and "v1" in request
    ]
    assert written == ["config", "weights", "manifest.json"]
    assert content(place, tmp_path / "b") == {"weights": b"weights", "config": b"{}"}
    store.requests.clear()
    write(place, tmp_path / "a")
    assert not any(request.startswith("PUT") for request in store.requests), "what is there and intact is kept"
    store.requests.clear()
    remove_set(place)
    deleted = [request for request in store.requests if request.startswith(("DELETE", "POST"))]
    assert deleted[0].startswith("DELETE") and deleted[0].endswith("v1/manifest.json") and len(deleted) == 2
    assert store.keys(place.url) == [] and read_manifest(place) is None


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_write_that_is_cut_leaves_what_was_there_before(
    store: ObjectStore, place: Location, tmp_path: Path, cut: int
) -> None:
    new = folder_of(tmp_path / "new", b"other weights", b"other")
    old = place.url.rpartition("/")[0] + "/v0"
    write(Location.parse(old), folder_of(tmp_path / "old"))
    for target, before in ((place, None), (Location.parse(old), {"weights": b"weights", "config": b"{}"})):
        store.faults = [Fault(FULL, "PUT", skip=cut - 1)]
        with pytest.raises(StoreFull, match="the bucket is full"):
            write(target, new)
        store.faults.clear()
        if before is None:
            assert read_manifest(target) is None and list(list_sets(Location.parse(old.rpartition("/")[0])).sets) == [
                "v0"
            ]
        else:
            assert content(target, tmp_path / "seen") == before
        write(target, new)
        assert content(target, tmp_path / f"{target.name}-after")["weights"] == b"other weights"


def test_a_delete_that_is_cut_leaves_nothing_that_is_read(
    store: ObjectStore, place: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, folder_of(tmp_path / "a"))
    store.faults = [Fault(DENIED, "POST")]
    with pytest.raises(StoreDenied):
        remove_set(place)
    store.faults.clear()
    parent = Location.parse(place.url.rpartition("/")[0])
    assert read_manifest(place) is None and len(store.keys(place.url)) == 2
    assert list_sets(parent).leftovers == [], "another process may be writing them now"
    monkeypatch.setattr(file_set, "LEFTOVER_AGE_S", -60.0)
    objects.delete_objects(parent, list_sets(parent).leftovers)
    assert store.keys(place.url) == []
    write(place, tmp_path / "a")
    assert list_sets(parent) == file_set.SetListing({"v1": list_sets(parent).sets["v1"]}, [])


def test_a_large_file_goes_in_parts_and_a_part_that_fails_leaves_nothing(
    store: ObjectStore, place: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects._PARTS["s3"], "chunksize", 5 * 2**20)
    large = folder_of(tmp_path / "a", bytes(range(256)) * 44_000)
    store.faults = [Fault(FULL, "PUT", "/weights", skip=1)]
    with pytest.raises(StoreFull):
        write(place, large)
    store.faults.clear()
    bucket = place.url.split("/")[2]
    assert not [key for key in store.keys(place.url) if not key.endswith("/config")]
    assert "Uploads" not in store.client().list_multipart_uploads(Bucket=bucket), "the parts are given up"
    store.requests.clear()
    write(place, large)
    # A store on a busy machine may be sent a part once more.
    assert len([each for each in store.requests if each.startswith("PUT") and each.endswith("/weights")]) >= 3
    assert content(place, tmp_path / "b")["weights"] == (large / "weights").read_bytes()


def test_an_overload_that_passes_is_not_noticed(store: ObjectStore, place: Location, tmp_path: Path) -> None:
    store.faults = [Fault(OVERLOADED, method, times=1) for method in ("PUT", "GET", "HEAD")]
    write(place, folder_of(tmp_path / "a"))
    assert content(place, tmp_path / "b")["weights"] == b"weights"
    assert all(fault.seen == 1 for fault in store.faults)


def test_what_lasts_is_said(
    store: ObjectStore, place: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "a")
    store.faults = [Fault(UNAVAILABLE, "PUT")]
    with pytest.raises(StoreUnreachable, match="after several attempts"):
        write(place, folder)
    assert 1 < store.faults[0].seen < 30, "the attempts have a limit"
    store.faults = [Fault(DENIED, "PUT")]
    with pytest.raises(StoreDenied, match="Access Denied"):
        write(place, folder)
    with pytest.raises(NoSuchBucket, match="does not exist"):
        write(Location.parse("s3://no-such-bucket/v1"), folder)


def test_damage_is_found_and_mended(store: ObjectStore, place: Location, tmp_path: Path) -> None:
    manifest = write(place, folder_of(tmp_path / "a"))
    weights = f"{place}/{manifest.folder}/weights"
    for damage in (b"weightz", b"", None):
        if damage is None:
            objects.delete_object(Location.parse(weights))
        else:
            store.put(weights, damage)
        with pytest.raises((StoredFileDamaged, StoredFileMissing)):
            read_file(place, manifest, "weights")
        with pytest.raises((StoredFileDamaged, StoredFileMissing)):
            fetch_set(place, manifest, tmp_path / "b")
        assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing half-fetched stays"
        write(place, tmp_path / "a")
        assert read_file(place, manifest, "weights") == b"weights"
    store.put(f"{place}/manifest.json", manifest.encoded()[:-20])
    with pytest.raises(StoredFileDamaged, match=r"manifest\.json"):
        read_manifest(place)
    write(place, tmp_path / "a")
    assert read_manifest(place) == manifest


def test_the_cache_is_bounded_and_checks_what_it_has(store: ObjectStore, place: Location, tmp_path: Path) -> None:
    parent = Location.parse(place.url.rpartition("/")[0])
    for number in range(4):
        write(parent / f"v{number}", folder_of(tmp_path / str(number), b"%d" % number * 100, b""))
    cache = FileCache(tmp_path / "cache", 250)

    def use(number: int) -> int:
        """The weights of a version are opened; returns how often they were fetched."""
        store.requests.clear()
        with cache.opened(parent / f"v{number}", {}) as folder:
            assert (folder / "weights").read_bytes() == b"%d" % number * 100
        return sum(each.startswith("GET") and each.endswith("/weights") for each in store.requests)

    assert [use(number) for number in (0, 1, 0, 2, 0, 1)] == [1, 1, 0, 1, 0, 1], "the one used longest ago goes"
    for path in (tmp_path / "cache").glob("*/weights"):
        path.write_bytes(b"damaged")
    assert use(1) == 1
    manifest = read_manifest(parent / "v3")
    assert manifest is not None
    with pytest.raises(StoredFileDamaged, match="does not name"), cache.opened(parent / "v3", {"weights": "a" * 64}):
        pass
    with pytest.raises(StoredFileMissing, match="no manifest"), cache.opened(parent / "v9", {}):
        pass
    with FileCache(tmp_path / "cache", 0).opened(
        parent / "v3", {"weights": manifest.files["weights"].sha256}
    ) as folder:
        assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]
