"""The drill: its faults and the pages agree, and it counts what goes wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drill.__main__ import play
from tests.drill.fault import FAULTS, Fault, Sight
from tests.drill.page import PAGES, Command, NotAsWritten, follow, transcripts
from tests.drill.shell import Shell
from tests.drill.sites import SITES

SEEN = Sight(code=7, says="the topic is gone")


def test_every_fault_has_its_transcript_and_every_transcript_its_fault() -> None:
    found = {(page.name, name) for page in PAGES.glob("*.md") for name in transcripts(page)}
    assert found == {(fault.page, fault.name) for fault in FAULTS.values()}
    assert len(FAULTS) >= 30 and {fault.site for fault in FAULTS.values()} == set(SITES)


def test_the_index_by_symptom_names_every_page_with_a_transcript() -> None:
    index = (PAGES / "by-symptom.md").read_text(encoding="utf-8")
    assert {fault.page for fault in FAULTS.values() if f"({fault.page}" not in index} == set()


def test_a_transcript_is_commands_with_codes_and_parts_of_their_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console gone\n$ a \\\n  b\nexit 7\nsaid   so\n```\n\n- x\n\n  ```console gone\n  $ c &\n  ```\n"
    )
    assert transcripts(page) == {"gone": [Command("a b", 7, ("said so",)), Command("c &", 0, ())]}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (Command("echo it is so; exit 3", 3, ("it is",)), ""),
        (Command("echo it is so", 3, ()), "ended with 0, the page says 3"),
        (Command("echo it is so", 0, ("it was",)), "does not print 'it was'"),
    ],
)
def test_a_command_that_does_another_thing_than_its_page_is_named(tmp_path: Path, command: Command, wrong: str) -> None:
    shell = Shell(tmp_path, {})
    if not wrong:
        follow([command], shell)
        return
    with pytest.raises(NotAsWritten, match=wrong):
        follow([command], shell)


def played(monkeypatch: pytest.MonkeyPatch, folder: Path, sight: Sight, *, heals: bool = True) -> Any:
    """Plays a fault that shows `sight` instead of SEEN."""
    page = folder / "page.md"
    page.write_text("```console gone\n$ true\n```\n")
    monkeypatch.setattr("tests.drill.__main__.PAGES", folder)

    def act(_: object) -> Iterator[Sight]:
        yield sight
        assert heals, "it does not work again"

    class Somewhere:
        shell = Shell(folder, {})

    return play(Fault("gone", "page.md", "here", SEEN, act), Somewhere())  # type: ignore[arg-type]


def test_what_is_silent_in_a_wrong_state_or_stuck_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_it_should = played(monkeypatch, tmp_path, SEEN)
    assert as_it_should.sound
    silent = played(monkeypatch, tmp_path, Sight(code=7, says="error"))
    assert silent.silent and not silent.wrong_state and not silent.stuck
    wrong = played(monkeypatch, tmp_path, Sight(code=0, says=SEEN.says))
    assert wrong.wrong_state == "exit 0 instead of exit 7" and not wrong.silent
    stuck = played(monkeypatch, tmp_path, SEEN, heals=False)
    assert "it does not work again" in stuck.stuck and not stuck.silent
