"""The file of environments: the page docs/how-to/environment-file.md executed, its mistakes, and who reads it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from schemas.records import Verifier
from tentalis.agents.environments.registry import (
    BUILT_IN,
    DATA,
    BadEnvironment,
    default_turns,
    has_episodes,
    known_environments,
    prepared_environment,
)
from tentalis.agents.workers import EpisodeLimits
from tentalis.agents.workers import run as run_worker
from tentalis.cli.main import app
from tentalis.cli.shared.variable_checks import variable_problems
from tentalis.rewards import registry
from tentalis.rewards.environment_file import BadEnvironmentFile
from tentalis.rewards.style_scorer import StyleScorer
from tentalis.rewards.verdict import UnknownEnvironment
from tentalis.service import variables
from tentalis.service.settings import Settings
from tests.support import ROOT
from tests.support.environment_pages import forget_environments, install_guess, write_environments
from tests.support.loop_records import result, task


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_environments()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_environments(tmp_path)


def env(*words: str, file: Path, typed: str = "") -> str:
    done = CliRunner().invoke(app, ["env", *words, "--file", str(file)], input=typed)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_environments_of_the_page_are_listed_and_shown(file: Path) -> None:
    rows = {row["environment"]: row["origin"] for row in json.loads(env("list", "-o", "json", file=file))}
    assert rows["capitals"] == f"{file} (toolcall)" and rows["sums"] == f"{file} (math)"
    assert rows["toolcall"] == "built in"
    question = "What is the capital of Peru?"
    shown = json.loads(env("show", "capitals", question, "-o", "json", "--allow-unsandboxed", file=file))
    assert (shown["base"], shown["scorer"], shown["data"]) == ("toolcall", "episode", {"wrong": -0.5})
    assert shown["limits"] == {"max_turns": 4, "environment_seconds": 60.0, "attempts": 2}
    system, asked = shown["messages"]
    assert '"name": "capital"' in system["content"] and '"name": "python"' not in system["content"]
    assert asked["content"] == question
    assert "scorer: math_verify" in env("show", "sums", file=file)


def test_an_episode_of_the_page_is_played_with_its_tools_data_and_limits(file: Path) -> None:
    call = json.dumps({"name": "capital", "arguments": {"country": "Peru"}})
    words = ("try", "capitals", "Peru?", "--data", '{"answer": "Lima"}', "--allow-unsandboxed")
    right = env(*words, file=file, typed=f"<tool_call>{call}</tool_call>\n\n\\boxed{{Lima}}\n\n")
    assert "<tool_response>\nLima\n</tool_response>" in right and "[score] answer 1, calls 1" in right
    assert "reward 1" in right
    wrong = env(*words, file=file, typed="\\boxed{Cusco}\n\n")
    assert "reward -0.5" in wrong, "the data of the file"
    assert "reward -0.1" in env(*words[:4], '{"answer": "a", "wrong": -0.1}', words[-1], file=file, typed="b\n\n")
    long = env(*words, file=file, typed=f"<tool_call>{call}</tool_call>\n\n" * 9)
    assert "[turn 4]" in long and "[turn 5]" not in long and "[the turns are over]" in long


def test_an_environment_without_episodes_is_one_answer_with_the_reward_of_its_verifier(file: Path) -> None:
    words = ("try", "sums", "What is 6 * 7?", "--data")
    for said, reward in (("42", 1), ("41", 0)):
        played = env(*words, '{"answer": "42"}', file=file, typed=f"\\boxed{{{said}}}\n\n")
        assert re.search(rf"\[reward\] {reward} by math_verify/", played)
    assert "[reward] unknown by math_verify/" in env(*words, "{}", file=file, typed="42\n\n")
    assert "[reward] unknown: the data of the verifier" in env(*words, '{"x": 1}', file=file, typed="42\n\n")


def test_the_variable_is_enough_for_a_process_that_checks_environments(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownEnvironment):
        registry.check_environment("capitals")
    monkeypatch.setenv(variables.ENVIRONMENT_FILE.name, str(file))
    registry.load_plugins.cache_clear()
    try:
        registry.check_environment("capitals")
        of = task(environment="sums", n=1, verifier=Verifier(name="math_verify", data='{"answer": "42"}'))
        assert registry.verify(of, result(of, text="\\boxed{42}")).reward == 1.0
        assert has_episodes("capitals") and not has_episodes("sums")
        assert prepared_environment("sums") is None
    finally:
        registry.load_plugins.cache_clear()


def test_a_worker_of_an_unknown_environment_does_not_start() -> None:
    missing = "'capitals' is not known; .* TENTALIS_ENVIRONMENT_FILE; if it is of a package, install the package"
    with pytest.raises(BadEnvironment, match=missing):
        run_worker(Settings(), environment="capitals", server="http://nowhere:1")


def test_what_one_completion_answers_is_prepared_without_episodes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "garden", {"weeding": StyleScorer()})  # as a package's scorer does
    registry.use_environments(file)
    assert [prepared_environment(name) for name in ("chat", "math", "garden", "sums")] == [None] * 4


def test_after_a_bad_file_the_scorers_of_packages_are_registered_by_the_next_call(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        name = "garden.weeding"

        def load(self) -> StyleScorer:
            return StyleScorer()

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == registry.PLUGIN_GROUP else [])
    monkeypatch.setenv(variables.ENVIRONMENT_FILE.name, str(file))
    text = file.read_text(encoding="utf-8")
    file.write_text("environments: {a: {base: nothing}}", encoding="utf-8")
    registry.load_plugins.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(BadEnvironmentFile, match="no environment 'nothing'"):
                registry.load_plugins()
            assert "garden" not in registry.ENVIRONMENTS
        file.write_text(f"{text}  beds: {{base: garden, scorer: weeding}}\n", encoding="utf-8")
        registry.load_plugins()
        assert registry.ENVIRONMENTS["beds"].keys() == {"weeding"} and "capitals" in registry.DECLARED
    finally:
        registry.ENVIRONMENTS.pop("garden", None)
        registry.load_plugins.cache_clear()


def test_each_built_in_environment_with_episodes_has_a_maker_its_data_and_a_scorer() -> None:
    scored = {name for name in registry.BUILT_IN if "episode" in registry.ENVIRONMENTS[name]}
    assert scored == BUILT_IN.keys() == DATA.keys()


def test_limits_of_the_command_come_before_those_of_the_file(file: Path) -> None:
    registry.use_environments(file)
    assert EpisodeLimits.of("capitals") == EpisodeLimits(4, 16, 60.0, 2)
    assert EpisodeLimits.of("capitals", 3, 9, 5.0, 1) == EpisodeLimits(9, 3, 5.0, 1)
    assert EpisodeLimits.of("toolcall") == EpisodeLimits() and default_turns("terminal") == 50
    plain = {"long": {"base": "terminal"}}
    file.write_text(yaml.safe_dump({"environments": plain}), encoding="utf-8")
    registry.use_environments(file)
    assert default_turns("long") == 50, "the base's"
    with pytest.raises(UnknownEnvironment):
        registry.check_environment("capitals")


def test_a_file_is_read_again_with_the_same_names(file: Path) -> None:
    registry.use_environments(file)
    registry.use_environments(file)
    assert [entry.name for entry in known_environments()].count("capitals") == 1


def test_the_environment_of_a_package_is_a_base(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_guess(tmp_path)
    file.write_text("environments:\n  few:\n    base: guess\n    limits: {max_turns: 1}\n", encoding="utf-8")
    words = [sys.executable, "-m", "tentalis.cli", "env", "try", "few", "Begin.", "--file", str(file)]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        words,
        input="7\n\n8\n\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "[turn 1]" in done.stdout and "[turn 2]" not in done.stdout and "[score] reward" in done.stdout


def bad(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadEnvironmentFile) as found:
        registry.use_environments(file)
    return str(found.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, "environments.a.base: this key is missing"),
        ({"base": "tolcall"}, "environments.a.base: there is no environment 'tolcall', did you mean toolcall?"),
        ({"base": "toolcall", "tool": {}}, "environments.a.tool: no such key, did you mean tools?"),
        ({"base": "echo", "limits": {"turns": 1}}, "environments.a.limits.turns: no such key, did you mean max_turns?"),
        ({"base": "echo", "limits": {"max_turns": 0}}, "environments.a.limits.max_turns: Input should be greater"),
        ({"base": "chat"}, "environments.a: the key scorer is missing: name one of chat, which has "),
        ({"base": "math", "scorer": "gsm9k"}, "environments.a.scorer: math has no verifier 'gsm9k' for answers, did"),
        ({"base": "chat", "scorer": "next_state"}, "environments.a.scorer: chat has no verifier 'next_state' for answ"),
        ({"base": "math", "scorer": "math", "data": {"a": 1}}, "environments.a.data: these are data of the verifier"),
        ({"base": "math", "scorer": "math", "limits": {"attempts": 1}}, "environments.a.limits: one completion answ"),
        ({"base": "terminal", "tools": {}}, "environments.a.tools: terminal takes no tools, as toolcall does"),
        (
            {"base": "toolcall", "tasks": "."},
            "environments.a.tasks: toolcall takes no tasks, as gui or swe or terminal does",
        ),
        ({"base": "terminal", "tasks": "nowhere"}, "environments.a.tasks: there is no folder"),
        ({"base": "toolcall", "tools": "nowhere.yaml"}, "environments.a.tools: there is no file"),
        ({"base": "toolcall", "tools": 7}, "environments.a.tools: give the name of a file of tools"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_what_is_right(file: Path, entry: dict[str, Any], problem: str) -> None:
    assert bad(file, yaml.safe_dump({"environments": {"a": entry}})).startswith(f"{file}: {problem}")


def test_other_mistakes_of_a_file(file: Path) -> None:
    assert "environments: this key is missing" in bad(file, "{}")
    assert "environment: no such key, did you mean environments?" in bad(file, "environment: {}")
    assert "toolcall: there is an environment with this name" in bad(file, "environments: {toolcall: {base: echo}}")
    assert "a name has letters" in bad(file, "environments: {a/b: {base: echo}}")
    assert "duplicate key" in bad(file, "environments:\n  a: {base: echo}\n  a: {base: llm}\n")
    assert "not list" in bad(file, "[]")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"base": "echo", "data": {"than": []}}, "environments.a.data: than: .*; the data of echo are then"),
        ({"base": "toolcall", "data": {"wrong": "x"}}, "environments.a.data: wrong: "),
        ({"base": "toolcall", "tools": {"python": False, "tolls": []}}, "tolls"),
    ],
)
def test_data_and_tools_are_checked_when_an_episode_is_prepared(
    file: Path, entry: dict[str, Any], problem: str
) -> None:
    file.write_text(yaml.safe_dump({"environments": {"a": entry}}), encoding="utf-8")
    registry.use_environments(file)
    with pytest.raises(ValueError, match=problem):
        prepared_environment("a", allow_unsandboxed=True)


def test_tools_of_the_command_beside_those_of_the_file_are_refused(file: Path) -> None:
    registry.use_environments(file)
    with pytest.raises(BadEnvironmentFile, match=r"capitals\.tools: .*leave --tools \(TOOLS_CONFIG\) out"):
        prepared_environment("capitals", tools=file, allow_unsandboxed=True)


def test_a_bad_file_is_found_before_processes_start(file: Path) -> None:
    file.write_text("environments: {a: {base: nothing}}", encoding="utf-8")
    (problem,) = variable_problems({variables.ENVIRONMENT_FILE.name: str(file)})
    assert "environments.a.base: there is no environment 'nothing'" in problem
    done = CliRunner().invoke(app, ["env", "list", "--file", str(file)])
    assert done.exit_code == 2 and "environments.a.base" in done.output
