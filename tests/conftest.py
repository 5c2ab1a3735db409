"""Fixtures and Hypothesis settings for all tests."""

import os

from hypothesis import settings

pytest_plugins = ["tests.support.kafka_fixture", "tests.support.registry_fixture"]

# The settings file of the user who runs the tests does not count.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"

# Without deadlines, a busy machine does not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
