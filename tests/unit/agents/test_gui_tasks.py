"""Tasks of the environment gui in a real browser: a scripted expert solves them, a null agent and one that cheats do
not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentOptions
from tentalis.agents.environments.gui import GuiEnvironment
from tentalis.agents.sandbox import Wall
from tests.support.browsers import available_browser
from tests.support.gui_experts import CHEATS, EXPERTS, call, turn
from tests.support.loop_records import task

TASKS = Path(__file__).parents[2] / "support/gui_tasks"


@pytest.fixture(scope="module", autouse=True)
def browser() -> None:
    available_browser()


def of_name(name: str, **data: Any) -> Task:
    verifier = Verifier(name="episode", data=json.dumps(data))
    return task(environment="gui", n=1, messages=[{"role": "user", "content": name}], verifier=verifier)


async def by_expert(wall: Wall, name: str, seed: int) -> dict[str, float]:
    made = GuiEnvironment(EnvironmentOptions(lambda: wall, tasks=TASKS))
    try:
        page = (await made.reset(of_name(name, seed=seed))).messages[-1].content
        goal = page.split("\n\n")[0]
        for each in EXPERTS[name]:
            transition = await made.step(turn(*each(goal, page)))
            page = "" if transition.done else transition.observation.messages[-1].content
        return dict(await made.score())
    finally:
        await made.close()


async def by_turns(wall: Wall, name: str, turns: tuple[str, ...]) -> dict[str, float]:
    made = GuiEnvironment(EnvironmentOptions(lambda: wall, tasks=TASKS))
    try:
        await made.reset(of_name(name))
        for each in turns:
            if (await made.step(each)).done:
                break
        return dict(await made.score())
    finally:
        await made.close()


@pytest.mark.parametrize("name", EXPERTS)
def test_an_expert_solves_it_and_a_null_agent_does_not(wall: Wall, name: str) -> None:
    score = asyncio.run(by_expert(wall, name, 1))
    assert score["reward"] == 1.0 and score["refused_calls"] == 0.0, score
    assert asyncio.run(by_turns(wall, name, (turn(call("done")),)))["reward"] == 0.0


@pytest.mark.parametrize("name", EXPERTS)
def test_an_agent_that_cheats_gets_nothing(wall: Wall, name: str) -> None:
    assert asyncio.run(by_turns(wall, name, CHEATS))["reward"] == 0.0
