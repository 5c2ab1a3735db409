"""Fixtures and Hypothesis settings for all tests."""

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tentalis.rewards.registry import ENVIRONMENTS

pytest_plugins = ["tests.support.kafka_fixture", "tests.support.kept_broker", "tests.support.registry_fixture"]

# The settings file of the user who runs the tests does not count, nor do the runs in the checkout's state directory.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
_HOME = tempfile.TemporaryDirectory(prefix="tentalis-tests-")
os.environ["TENTALIS_HOME"] = _HOME.name

# Without deadlines, a busy machine does not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def scorers_as_before() -> Iterator[None]:
    """Takes back the scorers that a test registered."""
    before = {name: dict(scorers) for name, scorers in ENVIRONMENTS.items()}
    yield
    if before != ENVIRONMENTS:
        ENVIRONMENTS.clear()
        ENVIRONMENTS.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects the tests without the garbage collector, which took half of the time. What is loaded by then stays, and
    no later collection looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Gives the garbage collector back what libraries expect to be collected at the exit."""
    gc.unfreeze()


# The rooms whose tests compute come early, so that tests that wait for brokers and processes fill the other core.
_FIRST = ("tests/chaos/", "tests/e2e/", *(f"tests/integration/{room}/" for room in ("trainer", "ops", "streams")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests by room; the order within a room stays."""
    items.sort(
        key=lambda item: next((at for at, room in enumerate(_FIRST) if item.nodeid.startswith(room)), len(_FIRST))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules three processes or more; fewer take the files in order."""
    if len(config.getvalue("tx") or ()) < 3 and (config.getvalue("numprocesses") or 0) < 3:
        return None
    from tests.support.scheduling import FromBothEnds

    return FromBothEnds(config, log)
