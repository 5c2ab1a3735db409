"""The fixture of tests that run actions behind a wall."""

import pytest

from tentalis.agents.sandbox import Wall
from tests.support.walls import available_wall


@pytest.fixture(scope="module")
def wall() -> Wall:
    return available_wall()
