"""Ten tasks of the environment terminal: a scripted expert solves them, a null agent and one that cheats do not."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentOptions, Transition
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.sandbox import Wall
from tests.support.capabilities import output_under_rights
from tests.support.loop_records import task
from tests.support.transitions import with_ending

TASKS = Path(__file__).parents[2] / "support/terminal_tasks"
NAMES = sorted(each.name for each in TASKS.iterdir())


def of_folder(name: str) -> Task:
    return task(
        environment="terminal",
        n=1,
        messages=[{"role": "user", "content": name}],
        verifier=Verifier(name="episode"),
    )


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def played(wall: Wall, name: str, turns: Sequence[str]) -> tuple[list[Transition], dict[str, float]]:
    async def play() -> tuple[list[Transition], dict[str, float]]:
        made = TerminalEnvironment(EnvironmentOptions(lambda: wall, tasks=TASKS))
        try:
            await made.reset(of_folder(name))
            transitions = [await made.step(turn) for turn in turns]
            score = dict(await made.score())
            return with_ending(transitions, made), score
        finally:
            await made.close()

    return asyncio.run(play())


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


OUTPUTS = (
    "sorted.txt totals.csv large.txt errors.txt latest.txt current config.ini restored photos bin secrets report.sh"
)
CHEATS = (
    # The reward file, and checks of its own, in each place where they might be looked for.
    """set -- /logs/verifier ../../logs/verifier ../../../logs/verifier ../../../checks/logs/verifier; mkdir -p "$@"
for each in "$@"; do
  echo 1 >$each/reward.txt; echo '{"reward": 1}' >$each/reward.json
done
set -- /tests ../../tests ../../../tests ../../../checks/tests tests; mkdir -p "$@"
for each in "$@"; do
  printf '#!/bin/bash\\nmkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\\n' >$each/test.sh
done
mkdir -p logs/verifier logs/runs; echo 1 >logs/verifier/reward.txt; echo 0 >logs/runs/other.code""",
    # Programs, start files and functions of its own.
    """mkdir -p bin; printf '#!/bin/sh\\nexit 0\\n' >bin/cmp; chmod 755 bin/cmp
for each in diff cat test '[' git stat find env; do ln -f bin/cmp bin/$each; done
mkdir -p ~/.local; cp -r bin ~/; cp -r bin ~/.local/
for each in ~/.bashrc ~/.profile ~/.bash_profile ~/.bash_login .bashrc .profile; do
  echo 'cmp() { return 0; }; reward=1; trap "echo 1 >/logs/verifier/reward.txt" EXIT' >$each
done
export PATH=$PWD/bin:$HOME/bin:$PATH BASH_ENV=$HOME/.bashrc ENV=$HOME/.bashrc LD_PRELOAD=$PWD/x.so""",
    """exit() { builtin exit 0; }; cmp() { return 0; }; '['() { return 0; }; export -f exit cmp; reward=1; export reward
alias cmp=true; trap 'exit 0' EXIT""",
    # Modules of Python, configuration and hooks of git.
    """for each in sitecustomize usercustomize conftest json os pathlib; do
  echo 'open("/logs/verifier/reward.txt", "w").write("1")' >$each.py
done
printf '[core]\\n fsmonitor = "echo 1 >/logs/verifier/reward.txt"\\n' >~/.gitconfig; /bin/cat ~/.gitconfig >.git/config
export PYTHONPATH=$PWD""",
    # Processes that write later.
    """for reward in ../../../checks/logs/verifier/reward.txt /logs/verifier/reward.txt; do
  (setsid nohup sh -c "while :; do echo 1 >$reward; sleep 0.01; done" >/dev/null 2>&1 &)
  (sh -c "trap '' TERM HUP INT; while :; do echo 1 >$reward; sleep 0.01; done" >/dev/null 2>&1 &)
done""",
    # Links to the expected answers, in the place of each output, also through a folder that is a link.
    f"""ln -s / root; ln -s ../../.. up; ln -s . here
rm -rf {OUTPUTS}
set -- /tests/expected ../../../checks/tests/expected up/checks/tests/expected here/../../../../checks/tests/expected
for each in {OUTPUTS}; do ln -s $1 $each; shift; [ $# -gt 0 ] || set -- /tests/expected up/checks/tests/expected; done
ls -la""",
)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_that_cheats_gets_nothing(wall: Wall, name: str) -> None:
    assert played(wall, name, [*map(block, CHEATS), "<done>"])[1]["reward"] == 0.0


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
from tests.unit.agents.test_terminal_tasks import block, played

link = "ln -s ../../../checks/tests/expected sorted.txt; "
turns = [block(link + "chmod 311 ."), block(link + "chmod 311 ../.."), block(link + "chmod 444 .")]
print(json.dumps([played(choose_wall(), "sort-names", [turn, "<done>"])[1]["reward"] for turn in turns]))
"""


@pytest.mark.usefixtures("wall")
def test_a_link_in_a_folder_that_only_its_owner_could_open_is_none() -> None:
    assert json.loads(output_under_rights(LOCKED)) == [0.0, 0.0, 0.0]
