"""The drill: its faults and the pages agree, and it counts what goes wrong."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drill.__main__ import PAGES, looks, play
from tests.drill.fault import FAULTS, Fault, Sight
from tests.drill.shell import Shell
from tests.drill.sites import SITES
from tests.support import ROOT
from tests.support.transcript import PageMismatch, ShownCommand, transcripts

SEEN = Sight(code=7, says="the topic is gone")
IN_CONTAINERS = {"compose": "docker/__main__.py", "kubernetes": "k8s/scenario.py"}  # run by make test-docker, test-k8s


def path_of(page: Path) -> str:
    return page.relative_to(PAGES).as_posix()


def test_every_fault_has_its_transcript_and_every_transcript_its_fault() -> None:
    named = {(path_of(page), name) for page in PAGES.rglob("*.md") for name in transcripts(page) if name}
    found = {(page, name) for page, name in named if name not in IN_CONTAINERS}
    looked_at = {(path_of(page), fault.name) for fault in FAULTS.values() for page in looks(fault)}
    assert found == {(fault.page, fault.name) for fault in FAULTS.values()} | looked_at
    assert len(looked_at) >= 5
    assert len(FAULTS) >= 30 and {fault.site for fault in FAULTS.values()} == set(SITES)


def test_every_transcript_in_containers_is_run_there() -> None:
    named = {(page.name, name) for page in PAGES.glob("*.md") for name in transcripts(page) if name in IN_CONTAINERS}
    assert {name for _, name in named} == IN_CONTAINERS.keys()
    for page, name in named:
        assert f'follow("operations/{page}"' in (ROOT / "tests" / IN_CONTAINERS[name]).read_text(encoding="utf-8")


def test_the_index_by_symptom_names_every_page_with_a_transcript() -> None:
    index = (PAGES / "by-symptom.md").read_text(encoding="utf-8")
    alerts = (PAGES / "helm.md").read_text(encoding="utf-8")  # has the runbooks
    assert {fault.page for fault in FAULTS.values() if f"({fault.page}" not in index + alerts} == set()


def test_every_page_is_executed_or_the_index_has_the_reason() -> None:
    index = (PAGES / "by-symptom.md").read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^- \[[\w ]+\]\(([\w/-]+\.md)\): (.+)$", index.partition("## Not executed")[2], re.M))
    without = {path_of(page) for page in PAGES.rglob("*.md") if not transcripts(page)} - {"by-symptom.md"}
    assert reasons.keys() == without, "give a new page a transcript that a test executes, or a reason in the index"
    assert all(len(reason.split()) > 5 for reason in reasons.values())


def test_a_runbook_looks_at_a_fault_before_the_way_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runbooks").mkdir()
    (tmp_path / "runbooks" / "alert.md").write_text("```console gone\n$ test ! -e back && touch looked\n```\n")
    result = played(monkeypatch, tmp_path, SEEN, mends="test -e looked && touch back")
    assert result.sound, result.stuck
    assert (tmp_path / "back").exists()
    (tmp_path / "runbooks" / "alert.md").write_text("```console gone\n$ false\n```\n")
    assert "`false` ended with 1" in played(monkeypatch, tmp_path, SEEN).stuck


def test_every_transcript_without_a_name_is_run_by_a_test() -> None:
    files = [file for room in ("integration", "e2e") for file in (ROOT / "tests" / room).rglob("*.py")]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    unnamed = [page for page in PAGES.rglob("*.md") if "" in transcripts(page)]
    assert [page.name for page in unnamed if f'"{page.parent.name}" / "{page.name}"' not in sources] == []


def test_a_command_in_the_background_is_begun_and_the_next_does_not_wait(tmp_path: Path) -> None:
    shell = Shell(tmp_path, {})
    try:
        shell.follow([ShownCommand("sleep 600 &"), ShownCommand("echo it is so; exit 3", ("it is",), 3, whole=False)])
    finally:
        shell.close()


def test_an_exported_variable_holds_for_later_commands(tmp_path: Path) -> None:
    shell = Shell(tmp_path, {})
    shown = ShownCommand('echo "$SIZE partitions"', ("12 partitions",), whole=False)
    shell.follow([ShownCommand("export SIZE=12"), shown])
    with pytest.raises(PageMismatch):
        Shell(tmp_path, {}).follow([shown])


def played(
    monkeypatch: pytest.MonkeyPatch, folder: Path, sight: Sight, *, heals: bool = True, mends: str = "true"
) -> Any:
    """Plays a fault that shows `sight` instead of SEEN, and whose way back is the command `mends`."""
    page = folder / "page.md"
    page.write_text(f"```console gone\n$ {mends}\n```\n")
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
