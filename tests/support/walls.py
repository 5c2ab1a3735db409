"""The wall of this machine, for tests that run actions behind it."""

import pytest

from tentalis.agents.sandbox import Wall, WallMissing, choose_wall


def available_wall() -> Wall:
    """Returns the wall. Skips the test if this machine has none."""
    try:
        return choose_wall()
    except WallMissing as error:
        pytest.skip(str(error))
