"""Schemas that change while the topics live: one version behind and one ahead. test_registry.py holds the same for a
registry."""

from pathlib import Path

import pytest

from schemas.wire.codec import SINGLE_OBJECT
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka, ensure_topics
from tests.support.next_version import both_ways

pytestmark = pytest.mark.broker


def test_records_of_the_previous_and_the_next_schema_version_are_processed(
    kafka: Kafka, unique: str, tmp_path: Path
) -> None:
    settings = Settings(bootstrap=kafka.bootstrap)
    ensure_topics(settings)
    both_ways(settings, tmp_path, unique, SINGLE_OBJECT)
