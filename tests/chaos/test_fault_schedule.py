"""A minute of the fault schedule (`make chaos` runs ten): no record lost, wrong or duplicated."""

import json
import random
from pathlib import Path

import pytest

from tests.chaos.fault_schedule import KINDS, run, sound

pytestmark = [pytest.mark.broker, pytest.mark.chaos, pytest.mark.timeout(1500)]


def test_stream_applications_lose_nothing_when_stopped_frozen_and_killed(tmp_path: Path) -> None:
    report = run(tmp_path, seconds=60, tasks=1800, seed=random.SystemRandom().randrange(2**32))
    print(json.dumps(report))
    assert sound(report), report
    assert report["tasks"] == 1800
    assert report["done"].keys() >= KINDS
    # Seven kinds where the machine keeps up. On a busy one no score meets its hint before the deadline.
    assert len(report["outcomes"].keys() & {"both", "rl", "opd", "expired", "failed", "late", "superseded"}) >= 4
    assert all(report["numbers"][what] > 0 for what in ("dead_letters", "husks", "buckets", "corrected"))
