"""Many undecodable records are one line."""

import logging
import subprocess
import sys
import time

import pytest

from tentalis.kafka.consumer import headers_in
from tentalis.kafka.skipped import WITHOUT_HEADERS, SkippedRecords
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


def test_a_slow_command_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords(delay=0.0)
    skipped.wait_for_report()
    for number in range(3):
        skipped.add(ValueError(f"tentalis.runs.v1[0]@{number}: bad magic"))
        time.sleep(0.05)  # a timer would have logged
    assert caplog.messages == []
    skipped.report()
    (line,) = caplog.messages
    assert line == "3 records cannot be decoded and are skipped; the first: tentalis.runs.v1[0]@0: bad magic"


@pytest.mark.parametrize(("command", "at_the_end"), [("config", True), ("serve", False)])
def test_commands_report_at_their_end_and_processes_while_they_run(command: str, at_the_end: bool) -> None:
    program = (
        "import sys\nfrom tentalis.cli.main import app\nfrom tentalis.kafka.skipped import ALL\n"
        f"try: app(['{command}', 'nosuch'])\nexcept SystemExit: pass\nprint({{each._delay for each in ALL}})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1] == "{None}") == at_the_end, done.stdout + done.stderr


def test_a_process_says_so_without_an_end(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords(delay=0.01)
    with caplog.at_level(logging.WARNING):
        skipped.add(ValueError("tentalis.runs.v1[0]@7: bad magic"))
        eventually(lambda: caplog.messages == ["skipped: tentalis.runs.v1[0]@7: bad magic"], 5)
        skipped.add(ValueError("tentalis.runs.v1[0]@8: bad magic"))
        eventually(lambda: len(caplog.messages) == 2, 5)


def test_many_records_without_readable_headers_are_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        def __init__(self, offset: int) -> None:
            self._offset = offset

        def headers(self) -> None:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        def topic(self) -> str:
            return "tentalis.tasks.v1"

        def partition(self) -> int:
            return 0

        def offset(self) -> int:
            return self._offset

    monkeypatch.setattr(WITHOUT_HEADERS, "_delay", None)
    for offset in range(3):
        assert headers_in(Odd(offset)) == ()  # type: ignore[arg-type]
    assert caplog.messages == []
    WITHOUT_HEADERS.report()
    assert caplog.messages == [
        "3 records have a header name that is not UTF-8: their headers are left out; the first: tentalis.tasks.v1[0]@0"
    ]
