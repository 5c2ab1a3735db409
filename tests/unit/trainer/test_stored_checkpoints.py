"""Checkpoints and adapters in an object store: continued from on another machine, pruned, never overwritten."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.service.settings import Settings
from tentalis.storage import file_set
from tentalis.storage.errors import StoreFull
from tentalis.storage.location import Location
from tentalis.storage.places import adapters_location, checkpoints_location
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.object_store import FULL, Fault, ObjectStore, environment_of, object_store
from tests.unit.trainer.test_resume import ADAPTER, checkpoint, log_of, plan, result
from trainer.run.checkpoint import Checkpoint, checkpoint_root, remove_checkpoints
from trainer.run.publish import AdapterExists, prune_adapters, publish_adapter
from trainer.run.resume import newest_checkpoint
from trainer.run.stored_checkpoints import fetch_checkpoint, remove_stored, stored_steps, upload_checkpoint


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as found, environment_of(found):
        yield found


@pytest.fixture
def settings(server: ObjectStore, tmp_path: Path) -> Iterator[Settings]:
    yield Settings(home=tmp_path / "home", store=f"{server.bucket()}/team")
    server.faults.clear()


def elsewhere(settings: Settings, tmp_path: Path) -> Settings:
    """The same store, seen from a machine that has nothing."""
    return settings.model_copy(update={"home": tmp_path / "elsewhere"})


def files(found: Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in found.folder.iterdir()}


def test_another_machine_continues_from_the_newest_that_the_log_confirms(settings: Settings, tmp_path: Path) -> None:
    run = log_of([plan(1), plan(2)], [result(0, 0), result(1, 1)])
    root = checkpoint_root(settings, "run")
    assert root == settings.home / "checkpoints" / "run", "written to this machine first"
    saved = [checkpoint(root, 0), checkpoint(root, 1), checkpoint(root, 2, owner="zombie")]
    for each in saved:
        upload_checkpoint(settings, each)
    there = elsewhere(settings, tmp_path)
    found, damaged = newest_checkpoint(there, run)
    assert found is not None and found.state == saved[1].state and damaged == []
    assert files(found) == files(saved[1]) and found.folder.parent == checkpoint_root(there, "run")
    assert newest_checkpoint(settings, run) == (saved[1], []), "what is here is not fetched"
    (saved[1].folder / ADAPTER_WEIGHTS).write_bytes(b"damaged")
    mended, damaged = newest_checkpoint(settings, run)
    assert mended is not None and files(mended) == files(found) and damaged == []
    assert len(list((root / "damaged").iterdir())) == 1


def test_a_damaged_one_in_the_store_is_passed_over_and_written_again(
    settings: Settings, server: ObjectStore, tmp_path: Path
) -> None:
    run = log_of([plan(1), plan(2)], [result(0, 0), result(1, 1), result(2, 1)])
    saved = [checkpoint(checkpoint_root(settings, "run"), step) for step in (1, 2)]
    for each in saved:
        upload_checkpoint(settings, each)
    place = checkpoints_location(settings, "run") / saved[1].folder.name
    (weights,) = (key for key in server.keys(place.url) if key.endswith(ADAPTER_WEIGHTS))
    server.put(f"{place}/{weights}", ADAPTER[:-1])
    there = elsewhere(settings, tmp_path)
    found, _ = newest_checkpoint(there, run)
    assert found is not None and found.state.step == 1
    upload_checkpoint(settings, saved[1])
    found, _ = newest_checkpoint(there, run)
    assert found is not None and files(found) == files(saved[1])


def test_an_upload_that_is_cut_is_not_seen_and_is_finished_by_the_next_start(
    settings: Settings, server: ObjectStore, tmp_path: Path
) -> None:
    saved = checkpoint(checkpoint_root(settings, "run"), 1)
    there = elsewhere(settings, tmp_path)
    for cut in range(5):
        server.faults = [Fault(FULL, "PUT", skip=cut)]
        with pytest.raises(StoreFull):
            upload_checkpoint(settings, saved)
        assert fetch_checkpoint(there, "run", lambda _: True, tmp_path / "other") is None
        assert stored_steps(settings, "run") == {}
    server.faults.clear()
    upload_checkpoint(settings, saved)
    assert fetch_checkpoint(there, "run", lambda _: True, tmp_path / "other") is not None


def test_steps_in_the_store_are_counted_and_removed(settings: Settings) -> None:
    root = checkpoint_root(settings, "run")
    saved = [checkpoint(root, step) for step in range(3)]
    for each in saved:
        upload_checkpoint(settings, each)
    names = [each.folder.name for each in saved]
    assert stored_steps(settings, "run") == dict(zip(names, range(3), strict=True))
    remove_checkpoints(saved)
    remove_stored(settings, "run", names[:2])
    assert stored_steps(settings, "run") == {names[2]: 2}
    assert stored_steps(settings.model_copy(update={"store": None}), "run") == {}


def test_an_adapter_is_published_once_under_its_name(settings: Settings, server: ObjectStore) -> None:
    place = adapters_location(settings, "tiny")
    saved = checkpoint(checkpoint_root(settings, "run"), 1)
    server.faults = [Fault(FULL, "PUT", "manifest.json")]
    with pytest.raises(StoreFull):
        publish_adapter(place, 1, saved)
    assert file_set.read_manifest(place / "v1") is None, "a server refuses it"
    server.faults.clear()
    for _ in range(2):
        published = publish_adapter(place, 1, saved)
        assert published.url == f"{settings.store}/adapters/tiny/v1"
    manifest = file_set.read_manifest(published)
    assert manifest is not None and file_set.read_file(published, manifest, ADAPTER_WEIGHTS) == ADAPTER
    other = saved.model_copy(update={"state": saved.state.model_copy(update={"adapter_sha256": "a" * 64})})
    shutil.rmtree(saved.folder)
    with pytest.raises(AdapterExists, match="holds an adapter with sha256"):
        publish_adapter(place, 1, other.model_copy(update={"folder": checkpoint(saved.folder.parent, 1).folder}))


def test_adapters_in_the_store_are_pruned_as_on_a_disk(settings: Settings) -> None:
    place = adapters_location(settings, "tiny")
    saved = checkpoint(checkpoint_root(settings, "run"), 1)
    for version in range(6):
        publish_adapter(place, version, saved)
    prune_adapters(place, 2, lambda present: {1, 99} & set(present))
    assert list(file_set.list_sets(place).sets) == ["v1", "v4", "v5"]
    prune_adapters(Location(f"{place}-of-nobody"), 2, set)
