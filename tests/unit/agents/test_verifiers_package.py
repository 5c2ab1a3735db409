"""The environment verifiers with the real package: episodes, scores, refusals, and faults.

Skipped where no Python has verifiers. `VERIFIERS_PYTHON` names one: `python -m venv v; v/bin/pip install
'verifiers==0.3.0'; VERIFIERS_PYTHON=v/bin/python pytest tests/unit/agents/test_verifiers_package.py`.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from schemas.records import Message, Verifier
from tentalis.agents.environments import EnvironmentFault, verifiers, verifiers_process
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.environments.verifiers import VerifiersEnvironment, rows_of
from tentalis.agents.environments.verifiers_process import BadVerifiersEnvironment
from tentalis.cli.main import app
from tentalis.rewards import registry
from tests.support.environment_pages import blocks, forget_environments
from tests.support.loop_records import task

PYTHON = os.environ.get("VERIFIERS_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="VERIFIERS_PYTHON names no Python that has the package verifiers"
)
CASES = '''
import asyncio
import os
import time

import verifiers as vf
from datasets import Dataset


class Talk(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["heard"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        state["heard"].append(said)
        if said == "die":
            os._exit(7)
        if said == "block":
            time.sleep(3600)
        if said == "cancel":
            raise asyncio.CancelledError
        if said == "tool":
            raise vf.ToolError("no such tool")
        if said == "defect":
            raise KeyError("secret")
        if said == "rewrite":
            messages[0]["content"] = "another question"
        return [vf.UserMessage(content=f"pid {os.getpid()}"), vf.UserMessage(content=" ".join(state["heard"]))]


class Rewriting(Talk):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if len(state["trajectory"]) == 0 else [vf.UserMessage(content="a summary")]


async def short(completion, state):
    return float(len(state["heard"]) < 3)


def exact(completion, answer, info):
    return info["worth"] if completion[-1].content == answer else 0.0


def failing(completion):
    raise ValueError(f"cannot read {completion[-1].content!r}")


async def slow(completion):
    await asyncio.sleep(3600)


def groups(completions):
    return [0.0 for _ in completions]


async def search(query: str) -> str:
    """Searches.

    Args:
        query: the words.
    """
    return query


class Own(vf.SingleTurnEnv):
    async def get_model_response(self, state, prompt, **kwargs):
        raise NotImplementedError


def load_environment(kind="talk", weights=(1.0, 0.5)):
    row = {"question": "Say something.", "answer": "b", "info": {"worth": 2.0}}
    given = {"dataset": Dataset.from_list([row] * 3), "system_prompt": "Be brief."}
    both = vf.Rubric(funcs=[exact, short], weights=list(weights))
    if kind == "group":
        return vf.EnvGroup([Talk(rubric=both, max_turns=4, **given), load_environment("single")], ["talk", "single"])
    if kind == "tools":
        return vf.ToolEnv(tools=[search], rubric=both, **given)
    if kind == "judged":
        judge = vf.JudgeRubric(judge_client=object())
        return vf.SingleTurnEnv(rubric=vf.RubricGroup([vf.RubricGroup([both, judge])]), **given)
    classes = {"single": vf.SingleTurnEnv, "own": Own, "rewriting": Rewriting}
    if kind == "groups":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[groups]), **given)
    if kind in ("failing", "slow"):
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[{"failing": failing, "slow": slow}[kind]]), **given)
    if kind == "single":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[exact]), **given)
    return classes.get(kind, Talk)(rubric=both, **({} if kind == "own" else {"max_turns": 4}), **given)
'''
RANGE = {"reward_range": [0.0, 2.5]}
ROW = {"answer": "b", "info": {"worth": 2.0}, "example_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("verifiers")
    (made / "cases.py").write_text(CASES, encoding="utf-8")
    return made


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_environments()


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    verifiers.shared_process.cache_clear()


def declare(folder: Path, kind: str, **data: Any) -> None:
    entry = {"base": "verifiers", "python": str(PYTHON), "data": {"name": "cases", "arguments": {"kind": kind}, **data}}
    file = folder / "environments.yaml"
    file.write_text(yaml.safe_dump({"environments": {"cases": entry}}), encoding="utf-8")
    registry.use_environments(file)


def prepared(folder: Path, kind: str = "talk", **data: Any) -> VerifiersEnvironment:
    declare(folder, kind, **(RANGE | data))
    make = prepared_environment("cases")
    assert make is not None
    made = make()
    assert isinstance(made, VerifiersEnvironment)
    return made


async def begun(environment: VerifiersEnvironment, row: Mapping[str, Any] = ROW) -> list[str]:
    data = dict(registry.declared_environments()["cases"].data) | {"row": dict(row)}
    asked = task().model_copy(
        update={
            "environment": "cases",
            "messages": (Message(role="user", content="Say something."),),
            "verifier": Verifier(name="episode", data=json.dumps(data)),
        }
    )
    return [message.content for message in (await environment.reset(asked)).messages]


def scored(environment: VerifiersEnvironment, *turns: str, row: Mapping[str, Any] = ROW) -> Mapping[str, float]:
    async def play() -> Mapping[str, float]:
        await begun(environment, row)
        try:
            for text in turns:
                await environment.step(text)
            return await environment.score()
        finally:
            await environment.close()

    return asyncio.run(play())


def test_the_environment_of_the_page_is_listed_and_played(tmp_path: Path) -> None:
    (tmp_path / "digit.py").write_text(blocks("verifiers.md", "python")[0], encoding="utf-8")
    file = tmp_path / "environments.yaml"
    text = blocks("verifiers.md", "yaml")[0].replace(".verifiers/bin/python", str(PYTHON))
    file.write_text(text, encoding="utf-8")
    listed = CliRunner().invoke(app, ["env", "rows", "guess-digit", "--file", str(file), "-o", "json"])
    rows = [json.loads(line) for line in listed.output.splitlines() if line.startswith("{")]
    assert listed.exit_code == 0 and [row["row"]["answer"] for row in rows] == list("0123456789")
    words = ["env", "try", "guess-digit", "Which digit?", "--data", '{"row": {"answer": "7"}}', "--file", str(file)]
    played = CliRunner().invoke(app, words, input="3\n\n8\n\n7\n\n")
    assert "[turn 1]\n3\n\n[user]\nhigher\n" in played.output and "[user]\nlower" in played.output
    assert "[score] near 1, num_turns 3, reward 1" in played.output


def test_an_episode_has_the_turns_the_state_and_the_parts_of_its_environment(folder: Path) -> None:
    environment = prepared(folder)

    async def play() -> tuple[list[str], list[str], list[bool]]:
        prompt = await begun(environment)
        first = await environment.step("a")
        rest = [(await environment.step(text)).done for text in ("a", "a", "b")]
        return prompt, [message.content for message in first.observation.messages], rest

    prompt, heard, done = asyncio.run(play())
    assert prompt == ["Say something."] and heard[1] == "a" and done == [False, False, True]
    parts = asyncio.run(environment.score())
    # `exact` is worth 2; `short` saw three messages; the sum 2 of [0, 2.5] becomes 0.6.
    assert parts == {"exact": 2.0, "short": 0.0, "num_turns": 4.0, "reward": pytest.approx(0.6)}
    asyncio.run(environment.close())


def test_two_episodes_at_the_same_time_have_states_of_their_own(folder: Path) -> None:
    one, two = prepared(folder), prepared(folder)

    async def play() -> list[str]:
        await begun(one)
        await begun(two)
        await one.step("x")
        await two.step("y")
        heard = [each.observation.messages[1].content for each in (await one.step("x2"), await two.step("y2"))]
        await one.close()
        await two.close()
        return heard

    assert asyncio.run(play()) == ["x x2", "y y2"]


def test_an_episode_that_ends_early_is_scored_for_what_was_played(folder: Path) -> None:
    assert scored(prepared(folder), "b")["reward"] == pytest.approx(1.0)  # exact 2 + 0.5 of short
    assert scored(prepared(folder)) == {"reward": -1.0}  # no turn was finished: 0, the lowest of the range


def test_a_single_turn_and_a_group_of_environments_are_played(folder: Path) -> None:
    assert scored(prepared(folder, "single"), "b")["exact"] == 2.0
    for member, turns in (("single", 1.0), ("talk", 1.0)):
        row = {**ROW, "info": {"worth": 2.0, "env_id": member}}
        assert scored(prepared(folder, "group"), "b", row=row)["num_turns"] == turns


def test_the_rows_are_prompts_with_the_system_prompt_of_the_environment(folder: Path) -> None:
    declare(folder, "single")
    rows = list(rows_of(registry.declared_environments()["cases"], evaluation=False))
    assert [row["row"]["example_id"] for row in rows] == [0, 1, 2]
    assert rows[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say something."},
    ]
    assert rows[0]["row"]["answer"] == "b" and rows[0]["row"]["info"] == {"worth": 2.0}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tools", r"ToolEnv has tools \(search\), which need the tool calls of a model's API"),
        ("judged", r"JudgeRubric sends each answer to gpt-4.1-nano: set `judge: true`"),
        ("groups", "RubricGroup rewards whole groups of answers"),
        ("own", "Own asks the model through a client of its own"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name_at_the_start(folder: Path, kind: str, reason: str) -> None:
    with pytest.raises(BadVerifiersEnvironment, match=reason):
        prepared(folder, kind)


def test_a_judge_that_the_file_allows_is_loaded(folder: Path) -> None:
    prepared(folder, "judged", judge=True)


def test_arguments_that_the_environment_does_not_have_are_said(folder: Path) -> None:
    with pytest.raises(BadVerifiersEnvironment, match="unexpected keyword argument 'sort'"):
        prepared(folder, "talk", arguments={"sort": "talk"})


@pytest.mark.parametrize(
    ("kind", "turns", "fault"),
    [
        ("failing", ("b",), "a reward function failed: failing: ValueError: cannot read 'b'"),
        ("talk", ("tool",), "the environment failed: ToolError: no such tool"),
        ("talk", ("defect",), "KeyError: 'secret'"),
        ("talk", ("cancel",), "the environment cancelled its episode"),
        ("rewriting", ("b",), "its prompt changes earlier messages"),
        ("talk", ("rewrite",), "its prompt changes earlier messages"),
    ],
)
def test_a_failure_is_a_fault_and_not_a_reward(folder: Path, kind: str, turns: tuple[str, ...], fault: str) -> None:
    with pytest.raises(EnvironmentFault, match=fault):
        scored(prepared(folder, kind), *turns)


def test_tasks_of_another_name_or_arguments_are_refused(folder: Path) -> None:
    environment = prepared(folder)
    declare(folder, "single")
    with pytest.raises(EnvironmentFault, match=r'is not one of cases with the arguments \{"kind": "talk"\}'):
        asyncio.run(begun(environment))


def test_a_process_that_dies_is_a_fault_and_the_next_episode_has_a_new_one(folder: Path) -> None:
    with pytest.raises(EnvironmentFault, match="the process of verifiers ended, with exit code 7"):
        scored(prepared(folder), "die")
    assert scored(prepared(folder), "b")["exact"] == 2.0


def test_a_score_is_ended_at_its_time_limit_and_the_process_goes_on(folder: Path) -> None:
    environment = prepared(folder, "slow")

    async def play() -> None:
        await begun(environment)
        await environment.step("b")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await environment.score()
        with pytest.raises(EnvironmentFault, match="the score was stopped"):
            await environment.score()
        await environment.close()

    asyncio.run(play())


def test_a_step_that_blocks_the_process_is_ended_at_its_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "STOP_S", 0.5)
    environment = prepared(folder)

    async def play() -> int:
        await begun(environment)
        pid = int((await environment.step("a")).observation.messages[0].content.split()[1])
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await environment.step("block")
        assert time.monotonic() - began < 5.0
        return pid

    pid = asyncio.run(play())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
