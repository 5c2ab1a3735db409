"""An archive of a run that is read back from an object store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.service.settings import Settings
from tentalis.storage.file_set import write_set
from tentalis.storage.location import Location
from tests.support import ROOT
from tests.support.object_store import environment_of, object_store
from trainer.replay.archive import BadArchive
from trainer.replay.stored_archive import archive_folder, export_to

GOLDEN = ROOT / "tests" / "golden" / "run"


@pytest.fixture
def place() -> Iterator[Location]:
    with object_store() as store, environment_of(store):
        yield Location.parse(store.bucket()) / "archive"


def test_an_archive_is_read_back_and_another_runs_is_kept(place: Location, tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="no archive"), archive_folder(place):
        pass
    write_set(place, GOLDEN, [path.name for path in GOLDEN.iterdir()])
    with archive_folder(place) as folder:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in GOLDEN.iterdir()
        }
    assert not folder.exists()
    with pytest.raises(BadArchive, match="other than the archive of run another"):
        export_to("another", Settings(), place)
    with archive_folder(Location.of_folder(GOLDEN)) as folder:
        assert folder == GOLDEN
