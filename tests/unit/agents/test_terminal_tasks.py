"""Ten tasks of the environment terminal: a scripted expert solves them, a null agent and one that cheats do not."""

import json
import re
from pathlib import Path

import pytest

from tentalis.agents.sandbox import Wall
from tests.redteam.episodes import CHEATS
from tests.support.capabilities import output_under_rights
from tests.support.terminal_play import TASKS, block, played

NAMES = sorted(each.name for each in TASKS.iterdir())


def solution(name: str) -> list[str]:
    """The commands of the expert: the parts of solve.sh between empty lines, one per turn."""
    text = (TASKS / name / "solution/solve.sh").read_text().removeprefix("#!/bin/bash\n")
    return [part for part in re.split(r"\n\n", text) if part.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_a_scripted_expert_solves_it_and_a_null_agent_does_not(wall: Wall, name: str) -> None:
    transitions, score = played(wall, name, [*map(block, solution(name)), "<done>"])
    assert score["reward"] == 1.0, [call.result for each in transitions for call in each.tool_calls]
    assert transitions[-1].done and score["commands"] == len(solution(name))
    assert played(wall, name, ["<done>"])[1]["reward"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_that_cheats_gets_nothing(wall: Wall, name: str) -> None:
    assert played(wall, name, [*map(block, CHEATS.values()), "<done>"])[1]["reward"] == 0.0


def test_a_link_to_the_expected_answer_is_none(wall: Wall, tmp_path: Path) -> None:
    """Without its removal the link would be a solution, which shows that the removal is what refuses it."""
    cheats = [block("ln -s ../../../checks/tests/expected sorted.txt"), block("ln -s /tests/expected sorted.txt")]
    assert [played(wall, "sort-names", [each, "<done>"])[1]["reward"] for each in cheats] == [0.0, 0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tentalis.agents.environments.terminal_checks.remove_outside_links", lambda folder: None)
        assert played(wall, "sort-names", [cheats[0], "<done>"])[1]["reward"] == 1.0


def test_solutions_and_checks_are_not_within_reach(wall: Wall) -> None:
    command = (
        f"cat {TASKS}/sort-names/solution/solve.sh {TASKS}/sort-names/tests/expected; ls {TASKS}; find / -name test.sh"
    )
    transitions, _ = played(wall, "sort-names", [block(command), "<done>"])
    said = transitions[0].observation.messages[0].content
    assert "sort -u" not in said and "Lin" not in said and "solution" not in said.replace("solution/solve.sh", "")


DEEP = """name=$(printf 'd%.0s' {1..200}); long=""; for _ in {1..15}; do long=$long$name/; done
outside=$(cd ../../.. && pwd -P); top=$PWD; mkdir -p $long; cd $long; mkdir -p $long; cd $long
ln -s $outside/checks/tests/expected answer; cd $top
ln -s $long first; ln -s first/$long second; ln -s second/answer sorted.txt"""


def test_a_link_below_a_folder_with_too_long_a_path_is_none(wall: Wall) -> None:
    assert played(wall, "sort-names", [block(DEEP), "<done>"])[1]["reward"] == 0.0


LOCKED = """
import json
from tentalis.agents.sandbox import choose_wall
from tests.support.terminal_play import block, played

link = "ln -s ../../../checks/tests/expected sorted.txt; "
turns = [block(link + "chmod 311 ."), block(link + "chmod 311 ../.."), block(link + "chmod 444 .")]
print(json.dumps([played(choose_wall(), "sort-names", [turn, "<done>"])[1]["reward"] for turn in turns]))
"""


@pytest.mark.usefixtures("wall")
def test_a_link_in_a_folder_that_only_its_owner_could_open_is_none() -> None:
    assert json.loads(output_under_rights(LOCKED)) == [0.0, 0.0, 0.0]
