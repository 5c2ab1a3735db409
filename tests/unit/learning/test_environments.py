"""A run whose answers are episodes: its prompts, its rewards, and what is refused."""

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from schemas.records import Task
from tentalis.agents.sandbox import WallMissing
from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.agents.workers import episodes
from tentalis.demo.runs import unchanged
from tentalis.inference.client import OpenAIClient
from tentalis.learning.environments import TOOLS_VARIABLE, episodes_of
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions
from tentalis.learning.play import stack_options
from tentalis.learning.runs import Data, LearnRun, begin, continued, kind_of, prepare_run, unfinished
from tentalis.learning.sample import Asked, ScoredAnswer, base_model, scored_answers
from tentalis.local.stack import build_stack
from tentalis.local.state import StateDir
from tentalis.python.answer_rows import answer_rows
from tentalis.rewards import registry
from tentalis.rewards.environment_file import BadEnvironmentFile
from tentalis.service.settings import Settings
from tests.support.asking_program import ASK
from tests.support.chat_backend import ChatScript, chat_backend
from tests.support.environment_pages import forget_environments, install_guess, write_environments
from tests.support.episode_server import EpisodeServer
from tests.support.gateway_lab import listening
from tests.support.loop_records import RUN, result, task


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(TOOLS_VARIABLE, raising=False)
    yield
    forget_environments()


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of the page write-an-environment, installed."""
    (tmp_path / "package").mkdir()
    install_guess(tmp_path / "package")
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    importlib.invalidate_caches()
    registry.load_plugins.cache_clear()
    yield
    registry.ENVIRONMENTS.pop("guess", None)
    registry.load_plugins.cache_clear()


def options_for(folder: Path, rows: list[dict[str, Any]], **more: Any) -> LearnOptions:
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return LearnOptions(str(source), held_out=str(source), group=4, max_tokens=16, **more)


def prepared(folder: Path, options: LearnOptions, said: list[str] | None = None) -> PromptScenario:
    run = folder / "run"
    run.mkdir()
    data = Data(Path(options.source), None if options.held_out is None else Path(options.held_out))
    prepare_run(run, options, data, (said if said is not None else []).append)
    return PromptScenario(run / "prompts")


def answers(scenario: PromptScenario, options: LearnOptions, server: EpisodeServer) -> list[list[ScoredAnswer]]:
    asked = Asked(2, 1.0, make=episodes_of(options))
    return asyncio.run(scored_answers(cast(Any, server), "m", scenario, scenario.held_out(9), asked))


def halving(text: str, turn: int) -> str:
    """Finds the number as a person would: by the middle of what is left."""
    low, high = 0, 99
    for said, heard in re.findall(r"I say (\d+)<\|im_end\|>\n<\|im_start\|>user\n(\w+)", text):
        low, high = (int(said) + 1, high) if heard == "higher" else (low, int(said) - 1)
    return f"I say {(low + high) // 2}"


@pytest.mark.usefixtures("guess")
def test_the_environment_of_the_page_plays_and_rewards_the_answers_to_prompts(tmp_path: Path) -> None:
    options = options_for(tmp_path, [{"prompt": f"Begin round {number}."} for number in range(3)], environment="guess")
    scenario = prepared(tmp_path, options)
    assert (scenario.environment, scenario.set.scorer) == ("guess", "episode")
    found = answers(scenario, options, EpisodeServer(["m"], halving))
    rewards = [each.reward for group in found for each in group]
    assert len(rewards) == 6 and all(reward is not None and 1 / 7 <= reward <= 1 for reward in rewards)
    assert len({group[0].text for group in found}) > 1, "each task hides another number"
    silent = answers(scenario, options, EpisodeServer(["m"], lambda text, turn: "?"))
    assert {each.reward for group in silent for each in group} == {0.0}


@pytest.mark.usefixtures("guess")
def test_an_episode_without_a_result_has_an_unknown_reward_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "FIRST_PAUSE_S", 0.0)
    options = options_for(tmp_path, [{"prompt": "Begin."}] * 2, environment="guess")
    scenario = prepared(tmp_path, options)
    (group, _) = answers(scenario, options, EpisodeServer(["other"], halving))
    assert (
        group[0].reward is None
        and "the episode has no result: The inference server answered 404: no m" in group[0].problem
    )


def test_the_columns_of_a_row_complete_the_data_of_the_file(tmp_path: Path) -> None:
    file = write_environments(tmp_path)
    rows: list[dict[str, Any]] = [
        {"prompt": "Peru?", "answer": "Lima"},
        {"prompt": "France?", "answer": "Paris", "wrong": 0.1},
        {"prompt": "Spain?", "capital": "Madrid"},
    ]
    options = options_for(tmp_path, rows, environment="capitals", environment_file=str(file), allow_unsandboxed=True)
    said: list[str] = []
    scenario = prepared(tmp_path, options, said)
    data = {prompt.messages[-1][1]: json.loads(scenario.verifier(prompt).data) for prompt in scenario.held_out(9)}
    assert data == {"Peru?": {"wrong": -0.5, "answer": "Lima"}, "France?": {"wrong": 0.1, "answer": "Paris"}}
    assert scenario.question("r", 0).verifier.name == "episode" and scenario.environment == "capitals"
    assert "line 3: data: capital: " in said[0] or "line 3: capital: " in said[0]
    assert "the data of toolcall are answer, wrong, encourage_calls" in said[0]
    call = '<tool_call>{"name": "capital", "arguments": {"country": "Peru"}}</tool_call>'
    lima = EpisodeServer(["m"], lambda text, turn: "\\boxed{Lima}" if turn else call)
    found = answers(scenario, options, lima)
    asked = [prompt.messages[-1][1] for prompt in scenario.held_out(9)]
    assert {name: group[0].reward for name, group in zip(asked, found, strict=True)} == {"Peru?": 1.0, "France?": 0.1}


def test_a_scorer_of_the_file_grades_single_answers(tmp_path: Path) -> None:
    file = write_environments(tmp_path)
    rows = [
        {"prompt": "6 * 7?", "answer": "42"},
        {"prompt": "1 + 1?", "answer": "2"},
        {"prompt": "b", "reference": "2"},
    ]
    options = options_for(tmp_path, rows, environment="sums", environment_file=str(file))
    said: list[str] = []
    scenario = prepared(tmp_path, options, said)
    assert (scenario.environment, scenario.set.scorer, scenario.prompt_count) == ("sums", "math_verify", 2)
    assert "line 3: the data of the verifier 'math_verify' is not valid" in said[0]
    assert episodes_of(options) is None


@pytest.mark.usefixtures("guess")
def test_a_reward_function_scores_what_an_environment_plays(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(completions, **columns):\n    return [0.5 for _ in completions]\n")
    target = f"{tmp_path / 'rewards.py'}:score"
    options = options_for(tmp_path, [{"prompt": "Begin.", "hint": 1}] * 2, environment="guess", rewards=(target,))
    scenario = prepared(tmp_path, options)
    scorers = yaml.safe_load((tmp_path / "run" / "scorers.yaml").read_text(encoding="utf-8"))
    assert scorers["environments"]["guess"]["reward"]["target"] == [target]
    assert json.loads(scenario.question("r", 0).verifier.data) == {"columns": {"hint": 1}}


def test_a_run_continues_with_the_same_file_only(tmp_path: Path) -> None:
    file = write_environments(tmp_path)
    rows = [{"prompt": "6 * 7?", "answer": "42"}] * 3
    options = options_for(tmp_path, rows, environment="sums", environment_file=str(file))
    data = Data(Path(options.source), Path(str(options.held_out)))
    runs = tmp_path / "runs"
    runs.mkdir()
    run = begin(runs, options, data, 0.0, unchanged, lambda: Path("/models/tiny"), lambda text: None)
    assert unfinished(runs, kind_of(options)) == LearnRun(run.run_id, run.folder, resumed=True)
    assert run.environment_file == file and continued(run, data) == run
    other = replace(options, environment="capitals", allow_unsandboxed=True)
    assert unfinished(runs, kind_of(other)) is None
    file.write_text(file.read_text(encoding="utf-8").replace("wrong: -0.5", "wrong: -1"), encoding="utf-8")
    with pytest.raises(LearnError, match=rf"environments\.yaml has changed since run {run.run_id} began.*--new"):
        continued(run, data)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "give reward functions"),
        ({"environment": "math"}, "the environment math gives no reward itself: .*--environment-file"),
        ({"environment": "ecko"}, "--environment ecko: the environment 'ecko' is not known; the known ones are"),
        ({"environment": "echo", "hint": "column"}, "--hint is for answers of one completion, and echo plays episodes"),
        ({"environment": "echo", "reward_range": (0.0, 1.0)}, "--reward-range is of reward functions: leave it out"),
        ({"environment": "echo", "judge": "http://x", "rewards": ("r.py:f",)}, "a judge .*not both"),
    ],
)
def test_options_that_do_not_fit_the_environment_are_refused(more: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions): return []\n", encoding="utf-8")
    if "rewards" in more:
        more = more | {"rewards": (f"{tmp_path / 'r.py'}:f",)}
    with pytest.raises(LearnError, match=problem):
        prepared(tmp_path, options_for(tmp_path, [{"prompt": "a"}] * 2, **more))


def test_tools_that_would_not_be_recorded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOOLS_VARIABLE, "tools.yaml")
    options = options_for(tmp_path, [{"prompt": "a", "answer": "1"}] * 2, environment="toolcall")
    with pytest.raises(LearnError, match="TOOLS_CONFIG is set"):
        prepared(tmp_path, options)


PROGRAM = (
    ASK
    + """
messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
if "Nothing" not in messages[0]["content"]:
    messages += [ask(messages), {"role": "user", "content": "Sure?"}]
    open("answer.txt", "w").write(ask(messages)["content"])
"""
)
CHECK = """
import json, pathlib, sys
answer = pathlib.Path(json.load(sys.stdin)["workspace"], "answer.txt").read_text()
print(json.dumps({"reward": float(answer == "yes")}))
"""
PROGRAMS = """
environments:
  pair:
    base: agent
    program:
      command: ["{python}", "{folder}/agent/pair.py"]
      readable: [agent]
      check: ["{python}", "{folder}/check.py"]
    limits: {attempts: 1}
"""


@pytest.fixture
def of_program(tmp_path: Path) -> tuple[LearnOptions, PromptScenario]:
    """Options of a run whose answers a program plays, and its prompts."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/pair.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "check.py").write_text(CHECK, encoding="utf-8")
    file = tmp_path / "environments.yaml"
    file.write_text(PROGRAMS, encoding="utf-8")
    rows = [{"prompt": "Is it?"}, {"prompt": "Nothing."}]
    options = options_for(tmp_path, rows, environment="pair", environment_file=str(file))
    try:
        return options, prepared(tmp_path, options)
    except WallMissing as error:
        pytest.skip(str(error))


def test_a_run_of_a_program_has_a_gateway(tmp_path: Path, of_program: tuple[LearnOptions, PromptScenario]) -> None:
    options, scenario = of_program
    data = Data(Path(options.source), Path(str(options.held_out)))
    (tmp_path / "runs").mkdir()
    run = begin(tmp_path / "runs", options, data, 0.0, unchanged, lambda: Path("/models/tiny"), lambda text: None)
    with StateDir(tmp_path / "home") as state:
        found = stack_options(state, Settings(home=tmp_path / "home"), run, scenario, options)
        names = {spec.name for spec in build_stack(found).specs}
    assert found.gateway == scenario.policy and {"gateway", "worker"} <= names and "sessions" not in names


def test_a_program_plays_the_answers_to_prompts_with_the_temperature_that_is_asked_for(
    of_program: tuple[LearnOptions, PromptScenario],
) -> None:
    options, scenario = of_program
    script = ChatScript(lambda messages: "yes" if len(messages) > 1 else "maybe")

    async def played(url: str) -> list[list[ScoredAnswer]]:
        asked = Asked(2, 0.0, make=episodes_of(options))
        async with OpenAIClient(url) as client:
            return await scored_answers(client, await base_model(client), scenario, scenario.held_out(9), asked)

    with listening(chat_backend(script)) as url:
        answered, silent = asyncio.run(played(url))
        bodies, script.failures = [*script.bodies], [503, 503]
        away, _ = asyncio.run(played(url))
    assert all(each.reward is None and "chat/completions with 503" in each.problem for each in away)
    assert [(each.text, each.reward) for each in answered] == [("yes", 1.0)] * 2
    assert all(each.reward is None and "made no call" in each.problem for each in silent)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {("base", 0.0, 16)}
    assert len(bodies) == 4 and len({body["seed"] for body in bodies}) == 2, "a seed for each sample"


def test_a_bad_file_of_environments_begins_nothing(tmp_path: Path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text("environments: {a: {base: echo, data: {than: 1}}}", encoding="utf-8")
    options = options_for(tmp_path, [{"prompt": "a"}] * 2, environment="a", environment_file=str(file))
    with pytest.raises(BadEnvironmentFile, match=r"environments\.a\.data: than"):
        prepared(tmp_path, options)


def test_the_rows_of_a_run_have_the_data_of_an_environment() -> None:
    def columns(data: str) -> Any:
        of: Task = task(n=1, verifier={"name": "episode", "data": data})
        return answer_rows(RUN, [result(of)])[0]["columns"]

    assert columns('{"answer": "42"}') == {"answer": "42"}
    assert columns('{"columns": {"answer": "42"}}') == {"answer": "42"}
