"""Sends a few thousand mutated records through the running applications; `make fuzz` sends 100,000."""

from pathlib import Path

import pytest

from tests.chaos import fuzz


@pytest.mark.broker
@pytest.mark.chaos
def test_every_mutated_record_is_processed_or_a_dead_letter(tmp_path: Path) -> None:
    report = fuzz.run(4_000, 1, tmp_path, 150)
    assert report["reasons"] == [], report
    assert report["dead"] > 1_000 and report["processed"] > 1_000
    assert report["sent"] == report["dead"] + report["processed"] == 4_000
