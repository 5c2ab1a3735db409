"""Large libraries are imported without runs of the garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from tentalis.service.imports import without_collections


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_while_a_library_is_imported_and_all_is_as_before_then() -> None:
    before = gc.get_stats()
    with without_collections():
        made = [{"own": list[object]()} for _ in range(10_000)]
        assert gc.get_stats() == before
    assert gc.isenabled() and len(made) == 10_000
    with pytest.raises(ModuleNotFoundError), without_collections():
        import tentalis.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
