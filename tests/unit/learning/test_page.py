"""The page "Train on your own data": its function scores its prompts, and its commands have their options."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from tentalis.cli.main import app
from tentalis.learning.columns import prompt_of
from tentalis.python import learn as python_learn
from tentalis.python.learn_arguments import checked_arguments
from tentalis.python.learned_run import LearnedRun
from tentalis.rewards.functions.scorer import load
from tests.support import ROOT
from tests.support.loop_records import result, task

PAGE = (ROOT / "docs" / "start" / "train-on-your-own-data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_function_scores_answers_to_the_prompts(tmp_path: Path) -> None:
    code = blocks("python")[0]
    (tmp_path / "rewards.py").write_text(code, encoding="utf-8")
    from tentalis.agents.scenarios.prompts import messages_of, verifier_of

    prompt, _ = prompt_of({"prompt": "Tell me something about bread.", "topic": "bread"}, 1)
    of = task(messages=messages_of(prompt), verifier=verifier_of(prompt), n=3)
    scorer = load(f"{tmp_path / 'rewards.py'}:score")
    texts = ("Bread rises.", "bread " * 40, "It rises.")
    rewards = [scorer.verify(of, result(of, index, text=text)).reward for index, text in enumerate(texts)]
    scorer.close()
    assert rewards == [1.0, 0.5, 0.0]


def test_the_commands_have_their_options() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tentalis learn")]
    assert len(lines) == 2
    named = {word for line in lines for word in shlex.split(line) if word.startswith("--")}
    named |= set(re.findall(r"`(--[a-z-]+)", PAGE))
    command = get_command(app).commands["learn"].load()  # type: ignore[attr-defined]
    assert named <= {option for parameter in command.params for option in parameter.opts}


def test_the_call_of_the_page_has_arguments_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        python_learn,
        "learn",
        lambda *words, **named: given.append((words, named)) or SimpleNamespace(curve=(), adapter="", held_out=None),
    )
    exec(blocks("python")[-1], {"score": test_the_commands_have_their_options})
    (((rows, _), named),) = given
    checked_arguments(named)
    assert prompt_of(rows[0], 1)[0].columns == {"topic": "bread"}
    assert set(re.findall(r"`run\.(\w+)", PAGE)) <= set(dir(LearnedRun)) | set(LearnedRun.__slots__)
