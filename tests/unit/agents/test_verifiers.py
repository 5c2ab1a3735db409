"""The environment verifiers without its package: what is refused and said, and the turns between its loop and ours."""

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tentalis.agents.environments import EnvironmentFault, verifiers, verifiers_process
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.environments.verifiers import VerifiersData
from tentalis.agents.environments.verifiers_child import Refused, Turns, plain
from tentalis.agents.environments.verifiers_process import BadVerifiersEnvironment, VerifiersProcess, VerifiersSettings
from tentalis.cli.main import app
from tentalis.rewards import registry
from tests.support.environment_pages import forget_environments


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    forget_environments()
    verifiers.shared_process.cache_clear()


def declare(folder: Path, **entry: Any) -> Path:
    file = folder / "environments.yaml"
    file.write_text(yaml.safe_dump({"environments": {"number": {"base": "verifiers", **entry}}}))
    registry.use_environments(file)
    return file


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    declare(tmp_path, data={"name": "number"})
    message = f"{sys.executable} has no package verifiers: {sys.executable} -m pip install 'verifiers==0.3.0'"
    with pytest.raises(BadVerifiersEnvironment) as refused:
        prepared_environment("number")
    assert str(refused.value) == f"the environment number of verifiers: {message}"


def test_an_environment_without_a_name_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(BadVerifiersEnvironment, match="needs a file of environments with `base: verifiers`"):
        prepared_environment("verifiers")
    declare(tmp_path)
    with pytest.raises(BadVerifiersEnvironment, match=r"data: \{name: NAME"):
        prepared_environment("number")
    declare(tmp_path, data={"name": "number", "row": {"answer": "1"}})
    with pytest.raises(BadVerifiersEnvironment, match=r"environments\.number\.data\.row"):
        prepared_environment("number")


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").touch(mode=0o600)
    file = declare(tmp_path, data={"name": "number"}, python="python")
    with pytest.raises(BadVerifiersEnvironment, match="python cannot be started"):
        prepared_environment("number")
    refused = CliRunner().invoke(app, ["env", "rows", "number", "--file", str(file)])
    assert refused.exit_code == 2 and "cannot be started" in refused.output
    other = CliRunner().invoke(app, ["env", "rows", "echo", "--file", str(file)])
    assert other.exit_code == 2 and "no environment of the file of environments with `base: verifiers`" in other.output


def started(folder: Path, script: str) -> VerifiersProcess:
    """A process whose interpreter is a script of the shell, which notes each of its starts."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho started >> {folder}/starts\n{script}\n")
    python.chmod(0o700)
    return VerifiersProcess(VerifiersSettings("number", "{}", False, python, folder))


def test_a_process_that_ends_within_a_reply_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_process, "START_S", 5.0)
    process = started(tmp_path, """read load; printf '{"id": 1, "ok'; exit 3""")
    with pytest.raises(BadVerifiersEnvironment, match="the process of verifiers ended, with exit code 3"):
        process.check()


def test_an_episode_ends_with_its_process_and_starts_no_other(tmp_path: Path) -> None:
    process = started(tmp_path, """read load; echo '{"id": 1, "ok": {}}'; read open; exit 4""")
    episode = process.episode()
    with pytest.raises(EnvironmentFault, match="exit code 4"):
        episode.ask("open")
    with pytest.raises(EnvironmentFault, match="the process of verifiers has ended"):
        episode.ask("step")
    episode.close()
    assert (tmp_path / "starts").read_text() == "started\n"
    process.episode()
    process.check()
    assert (tmp_path / "starts").read_text() == "started\nstarted\n"


def test_an_episode_that_waits_for_the_data_set_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_process, "STOP_S", 0.1)
    episode = started(tmp_path, "exec sleep 3600").episode()
    threading.Timer(0.1, episode.stop).start()
    began = time.monotonic()
    with pytest.raises(
        EnvironmentFault, match="number of verifiers: the process of verifiers ended, with exit code -9"
    ):
        episode.ask("open")
    assert time.monotonic() - began < 5.0


def test_a_reward_outside_its_range_is_refused_and_one_within_is_mapped() -> None:
    scaled = VerifiersData(name="number", reward_range=(0.0, 4.0))
    assert [verifiers._mapped(each, scaled) for each in (0.0, 3.0, 4.0000001)] == [-1.0, 0.5, 1.0]
    assert verifiers._mapped(0.25, VerifiersData(name="number")) == 0.25
    # Without a finished turn: the reward of the range that is nearest to 0.
    ranges = ((0.0, 4.0), (-2.0, 2.0), (1.0, 5.0), (-5.0, -1.0), None)
    nearest = [verifiers._mapped(None, VerifiersData(reward_range=each)) for each in ranges]
    assert nearest == [-1.0, 0.0, -1.0, 1.0, 0.0]
    with pytest.raises(EnvironmentFault, match=r"reward of number is 1\.5, outside \[-1, 1\].*such as \[0, 2\]"):
        verifiers._mapped(1.5, VerifiersData(name="number"))
    with pytest.raises(EnvironmentFault, match="is nan, outside"):
        verifiers._mapped(float("nan"), scaled)
    with pytest.raises(ValueError, match="reward_range must be the lowest and a higher reward"):
        VerifiersData(reward_range=(1.0, 1.0))


def played(*prompts: list[dict[str, str]], tools: Any = None) -> tuple[list[list[dict[str, str]]], str | None]:
    """Returns the new messages of each prompt that asks for a turn, whose text is its number, and the refusal."""

    async def play() -> tuple[list[list[dict[str, str]]], str | None]:
        turns, new = Turns(), []
        for number, prompt in enumerate(prompts, 1):
            asking = asyncio.ensure_future(turns.turn(prompt, tools, {}))
            await asyncio.wait({asking, got := asyncio.ensure_future(turns.asked.get())}, return_when="FIRST_COMPLETED")
            if asking.done():
                got.cancel()
                assert isinstance(asking.exception(), Refused)
                break
            new.append(got.result())
            assert turns.waiting is not None
            turns.waiting.set_result(f"turn {number}")
            assert await asking == f"turn {number}"
        return new, turns.refused

    return asyncio.run(play())


def test_only_what_a_prompt_adds_is_an_observation() -> None:
    first = [{"role": "system", "content": "s"}, user("example"), said("answer"), user("a")]
    new, refused = played(first, [*first, said("turn 1"), user("b"), user("c")])
    assert new == [first, [user("b"), user("c")]] and refused is None


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([user("a, rewritten"), said("turn 1"), user("b")], "its prompt changes earlier messages"),
        ([user("a"), said("turn 1, cut"), user("b")], "its prompt changes earlier messages"),
        ([user("b")], "its prompt changes earlier messages"),
        ([user("a"), said("turn 1")], "it asks for a turn without a new message"),
        ([user("a"), said("turn 1"), said("mine"), user("b")], "it writes a message of the assistant"),
    ],
)
def test_a_prompt_that_cannot_be_appended_is_refused(second: list[dict[str, str]], reason: str) -> None:
    new, refused = played([user("a")], second)
    assert new == [[user("a")]] and refused is not None and refused.startswith(reason)


def test_messages_that_are_not_text_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts}) == user("ab")
    for message, reason in (
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part that is not text"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]}, "tool calls"),
        ({"role": "assistant", "content": None}, "no text"),
        ({"role": "text", "content": "complete me"}, "no text"),
    ):
        with pytest.raises(Refused, match=reason):
            plain(message)
