"""The browser of the environment gui, for tests that run it."""

import pytest

from tentalis.agents.environments.gui_chromium import BrowserMissing, ChromiumFiles, chromium_files
from tentalis.agents.environments.gui_task import miniwob_names
from tentalis.agents.environments.terminal_task import TaskRefused
from tentalis.service.packages import MissingExtra, require


def available_browser() -> ChromiumFiles:
    """Returns the browser, which is fetched once. Skips the test if it or the pages of MiniWoB are not to be had."""
    try:
        require("the environment gui", "gui")
        miniwob_names()
        return chromium_files()
    except (BrowserMissing, MissingExtra, TaskRefused) as error:
        pytest.skip(str(error))
