"""Fixtures that every test may use."""

from hypothesis import settings

pytest_plugins = ["tests.kafka_fixture", "tests.registry_fixture"]

# A busy machine is no reason to fail.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
