"""Many undecodable records are one line."""

import logging

import pytest

from tentalis.kafka.skipped import SkippedRecords
from tests.support.kafka_fixture import eventually


def test_many_are_one_line_at_the_end_of_a_command(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords(delay=60.0)
    for number in range(640):
        skipped.add(ValueError(f"tentalis.runs.v1[0]@{number}: bad magic"))
    assert caplog.messages == []
    skipped.report()
    skipped.report()
    assert caplog.messages == [
        "640 records cannot be decoded and are skipped; the first: tentalis.runs.v1[0]@0: bad magic"
    ]


def test_a_process_says_so_without_an_end(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords(delay=0.01)
    with caplog.at_level(logging.WARNING):
        skipped.add(ValueError("tentalis.runs.v1[0]@7: bad magic"))
        eventually(lambda: caplog.messages == ["skipped: tentalis.runs.v1[0]@7: bad magic"], 5)
        skipped.add(ValueError("tentalis.runs.v1[0]@8: bad magic"))
        eventually(lambda: len(caplog.messages) == 2, 5)
