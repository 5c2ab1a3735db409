"""Lines of logs: their time, their level, and files that grow and are turned over while they are read."""

import logging
from pathlib import Path

import pytest

from tentalis.local import logfiles
from tentalis.local.log_reading import LogFile, LogParser, merged, wanted


def test_a_line_without_a_level_belongs_to_the_line_before() -> None:
    parse = LogParser("join").parse
    lines = [
        parse(text)
        for text in (
            "2026-01-31 12:00:00,250 INFO app: hello",
            "2026-01-31 12:00:01,000 ERROR app: failed",
            "  at some place",
            "2026-01-31T12:00:02,000 WARN the broker (Kafka)",
            "--- 2026-01-31 12:00:03 python -m x",
            "error: the end",
        )
    ]
    assert [line.at - lines[0].at for line in lines] == [0, 750, 750, 1750, 2750, 2750]
    levels = [logging.INFO, logging.ERROR, logging.ERROR, logging.WARNING, logging.INFO, logging.ERROR]
    assert [line.level for line in lines] == levels


def test_several_logs_are_merged_by_time_and_each_keeps_its_order(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2026-01-31 12:00:00,000 INFO x: 1\nunder 1\n2026-01-31 12:00:02,000 INFO x: 3\n")
    (tmp_path / "b.log").write_text("2026-01-31 12:00:01,000 INFO x: 2\n")
    files = [LogFile(name, tmp_path / f"{name}.log") for name in "ab"]
    lines = list(merged([file.past() for file in files]))
    assert [line.text[-1] for line in lines] == ["1", "1", "2", "3"]
    assert [line.text for line in filter(wanted(lines[2].at, logging.INFO), lines)] == [lines[2].text, lines[3].text]


def test_a_growing_log_is_followed_over_its_turn(tmp_path: Path) -> None:
    log, earlier = tmp_path / "a.log", tmp_path / "a.log.1"
    earlier.write_text("2026-01-31 12:00:00,000 INFO x: before\n")
    log.write_text("now\nhal")
    file = LogFile("a", log)
    assert [line.text.rpartition(" ")[2] for line in file.past()] == ["before", "now"]
    assert list(file.new()) == []
    with log.open("a") as writing:
        writing.write("f\n\xff\n")
    assert [line.text for line in file.new()] == ["half", "\xff"]
    log.write_text("anew\n")
    assert [line.text for line in file.new()] == ["anew"]
    log.unlink()
    assert list(file.new()) == []


def test_the_last_lines_before_a_turn_are_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "LIMIT", 10)
    log = tmp_path / "a.log"
    log.write_text("seen before\n")
    file = LogFile("a", log)
    assert [line.text for line in file.past()] == ["seen before"]
    for first, second in (("late", "anew"), ("later", "anew again")):
        with log.open("a") as writing:
            writing.write(f"{first}, and long\n")
        assert logfiles.turn_over(tmp_path) == ([log], "")
        with log.open("a") as writing:
            writing.write(f"{second}\n")
        assert [line.text for line in file.new()] == [f"{first}, and long", second]
