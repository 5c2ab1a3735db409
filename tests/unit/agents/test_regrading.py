"""Recorded episodes are graded again from their results alone, with the checks and tests of today."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Ending, Message, Result, Task, ToolCall, Verifier
from tentalis.agents.environments import Environment, EnvironmentOptions
from tentalis.agents.environments.regrading import REGRADERS, CannotRegrade
from tentalis.agents.environments.swe import SweEnvironment
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.sandbox import Wall
from tests.support import loop_records
from tests.support.swe_packages import PACKAGES
from tests.support.swe_repositories import write_folder
from tests.unit.agents.test_swe_tasks import block, correction, instance_of

TERMINAL_TASKS = Path(__file__).parents[2] / "support/terminal_tasks"


def asked(environment: str, content: str, data: Mapping[str, Any] | None = None, verifier: str = "episode") -> Task:
    return loop_records.task(
        n=1,
        environment=environment,
        messages=(Message(role="user", content=content),),
        verifier=Verifier(name=verifier, data=json.dumps(data or {})),
    )


def recorded(make: Callable[[], Environment], task: Task, turns: Sequence[str]) -> Result:
    """The result of an episode with these turns, as the worker records it."""

    async def play() -> Result:
        environment = make()
        calls: list[ToolCall] = []
        done = False
        try:
            await environment.reset(task)
            for turn in turns:
                transition = await environment.step(turn)
                calls += transition.tool_calls
                done = transition.done
            rewards = dict(await environment.score())
            calls += environment.ending_calls()  # type: ignore[attr-defined]
        finally:
            await environment.close()
        ending = Ending.DONE if done else Ending.TURN_LIMIT
        return loop_records.result(
            task, text=turns[-1], steps=tuple(turns), tool_calls=tuple(calls), rewards=rewards, ending=ending
        )

    return asyncio.run(play())


def graded_again(grader: tuple[str, str], options: EnvironmentOptions, result: Result) -> dict[str, float]:
    async def grade() -> dict[str, float]:
        return dict(await REGRADERS[grader](options).parts(result))

    return asyncio.run(grade())


def refused(grader: tuple[str, str], options: EnvironmentOptions, result: Result) -> str:
    with pytest.raises(CannotRegrade) as caught:
        graded_again(grader, options, result)
    return str(caught.value)


def no_wall() -> Wall:
    raise AssertionError("an answer needs no wall")


def test_an_answer_is_compared_again() -> None:
    task = asked("toolcall", "What is 6 * 7?", {"answer": "42", "encourage_calls": True})
    options = EnvironmentOptions(no_wall)
    right = loop_records.result(task, text="The answer is 42.", ending=Ending.DONE, rewards={"calls": 1.0})
    grader = ("toolcall", "answer")
    assert graded_again(grader, options, right) == {"calls": 1.0, "refused_calls": 0.0, "answer": 1.0, "reward": 1.0}
    wrong = loop_records.result(task, text="It is 41.", ending=Ending.DONE, rewards={"calls": 3.0})
    assert graded_again(grader, options, wrong)["reward"] == -0.95
    unanswered = loop_records.result(task, text="The answer is 42.", ending=Ending.TURN_LIMIT, rewards={"calls": 3.0})
    assert graded_again(grader, options, unanswered)["reward"] == -0.95, "a turn with a call is not the answer"
    other = loop_records.result(asked("toolcall", "?", {"answer": "42"}, "gsm8k"), ending=Ending.DONE)
    assert "name toolcall/gsm8k" in refused(grader, options, other)


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("swe"))


def changed_tests(folder: Path, into: Path, name: str) -> Path:
    """The same instances, in which the first test to pass of one is one that it cannot pass."""
    shutil.copytree(folder, into, symlinks=True)
    file = into / "instances.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["instance_id"] == name:
            row["FAIL_TO_PASS"] = json.dumps([*json.loads(row["FAIL_TO_PASS"]), "tests/test_other.py::test_other"])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return into


def test_a_recorded_patch_is_tested_again(wall: Wall, instances: Path, tmp_path: Path) -> None:
    package = PACKAGES[0]
    made = f"{correction(package)}\n" + block("echo more >notes.txt; rm README; chmod 755 roman.py")
    options = EnvironmentOptions(lambda: wall, tasks=instances)
    # Without <done>: what is left is recorded all the same.
    result = recorded(lambda: SweEnvironment(options), asked("swe", instance_of(package), {"digest": None}), [made])
    assert result.ending is Ending.TURN_LIMIT and result.rewards["reward"] == 1.0
    again = graded_again(("swe", "tests"), options, result)
    assert again == result.rewards and again["diff_files"] == 3.0
    changed = EnvironmentOptions(lambda: wall, tasks=changed_tests(instances, tmp_path / "new", instance_of(package)))
    less = graded_again(("swe", "tests"), changed, result)
    assert (less["reward"], less["edits"], less["pass_to_pass"]) == (0.0, 1.0, 1.0) and 0.0 < less["fail_to_pass"] < 1.0

    def altered(**fields: object) -> Result:
        patch, tests = (call for call in result.tool_calls if call.name in ("patch", "tests"))
        return result.model_copy(
            update={
                "tool_calls": (
                    patch.model_copy(update={"result": json.dumps(json.loads(patch.result or "") | fields)}),
                    tests,
                )
            }
        )

    grader = ("swe", "tests")
    assert "only the beginning" in refused(grader, options, altered(whole=False))
    assert "not text in UTF-8" in refused(grader, options, altered(patch="else"))
    assert "has no patch" in refused(grader, options, result.model_copy(update={"tool_calls": ()}))


def test_recorded_commands_are_run_again_before_the_checks(wall: Wall, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(TERMINAL_TASKS, tasks)
    options = EnvironmentOptions(lambda: wall, tasks=tasks)
    name = sorted(each.name for each in tasks.iterdir())[0]
    solve = (tasks / name / "solution/solve.sh").read_text().removeprefix("#!/bin/bash\n")
    turns = [block(part) for part in solve.split("\n\n") if part.strip()]
    result = recorded(lambda: TerminalEnvironment(options), asked("terminal", name), turns)
    assert result.rewards["reward"] == 1.0 and result.tool_calls[-1].name == "checks"
    grader = ("terminal", "checks")
    assert graded_again(grader, options, result) == result.rewards
    # Other checks: the digest that the task names is no longer that of the folder.
    named = result.model_copy(update={"task": asked("terminal", "Do it.", {"task": name, "digest": "0" * 64})})
    (tasks / name / "tests/test.sh").write_text("mkdir -p /logs/verifier; echo 0.25 >/logs/verifier/reward.txt\n")
    assert graded_again(grader, options, named)["reward"] == 0.25
    assert result.rewards["reward"] == 1.0
    # A turn that was cut off was not taken as an action.
    cut_off = result.model_copy(update={"steps": (*turns, block("rm -rf *"))})
    assert "another command than recorded" in refused(grader, options, cut_off)

    timed_out = result.model_copy(update={"ending": Ending.TIMED_OUT})
    assert "stopped with the episode" in refused(grader, options, timed_out)
    random = recorded(lambda: TerminalEnvironment(options), asked("terminal", name), [block("echo $RANDOM$RANDOM")])
    assert "turn 1 gives another output than recorded" in refused(grader, options, random)
