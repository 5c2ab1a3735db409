"""What the user's functions print and how they fail, picked from the logs of the processes that call them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.learning.function_log import PERIOD_S, PRINTED_LINES, TRACEBACKS, FunctionLines, FunctionLog
from tentalis.rewards.functions.process import output_log
from tentalis.rewards.functions.scorer import log as failure_log
from tentalis.service import logs


@pytest.fixture
def scoring(tmp_path: Path) -> Iterator[Path]:
    """The log of a process, with the format and the loggers of the product, and a line of an earlier run."""
    file = tmp_path / "scoring.log"
    file.write_text("2026-01-31 12:00:00,000 WARNING tentalis.rewards.functions.scorer: earlier\n", encoding="utf-8")
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter(logs.FORMAT))
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield file
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()


def test_failures_and_prints_are_shown_with_the_place_of_the_log_and_nothing_else(scoring: Path) -> None:
    followed = FunctionLog(scoring.parent)
    assert followed.new() == []
    output_log.info("%s prints: %s", "r.py", "hello")
    logging.getLogger("streams.apps.scoring.judging").exception("ours failed", exc_info=ValueError("of the product"))
    failure_log.warning("%s", "r.py:3: score: ZeroDivisionError: division by zero:\nTraceback\n  File r.py, line 3")
    assert followed.new() == [
        "r.py prints: hello",
        "r.py:3: score: ZeroDivisionError: division by zero:",
        "  Traceback",
        "    File r.py, line 3",
        f"`tentalis logs scoring` has all of it: {scoring}",
    ]
    output_log.info("%s prints: %s", "r.py", "again")
    assert followed.new() == ["r.py prints: again"]


def line(logger: str, message: str) -> str:
    return f"2026-01-31 12:00:00,000 INFO {logger}: {message}"


def test_a_flood_of_prints_is_counted() -> None:
    now = [0.0]
    lines = FunctionLines(lambda: now[0])
    shown = [lines.pick(line(output_log.name, str(number))) for number in range(PRINTED_LINES + 7)]
    assert shown == [*map(str, range(PRINTED_LINES)), *[None] * 7] and lines.left_out() == 0
    now[0] = PERIOD_S
    assert lines.left_out() == 7 and lines.left_out() == 0
    assert lines.pick(line(output_log.name, "next")) == "next"


def test_lines_without_a_traceback_use_up_no_tracebacks() -> None:
    lines = FunctionLines()
    for number in range(1, TRACEBACKS + 1):
        assert lines.pick(line(failure_log.name, said := f"{10**number} failures so far: r.py:1: KeyError")) == said
    lines.pick(line(failure_log.name, "r.py:2: KeyError:"))
    assert lines.pick("Traceback") == "  Traceback"


def test_after_a_few_tracebacks_only_the_first_line_of_a_failure_is_shown() -> None:
    lines = FunctionLines()
    for number in range(TRACEBACKS + 1):
        assert lines.pick(line(failure_log.name, f"failure {number}")) == f"failure {number}"
        assert lines.pick("Traceback") == ("  Traceback" if number < TRACEBACKS else None)
