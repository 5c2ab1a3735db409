"""The examples: their commands parse, their rows can be used, and their functions give the rewards stated here."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from schemas.records import Task
from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import messages_of, verifier_of
from tentalis.cli.learn import criterion_of, parse_columns, parse_range
from tentalis.cli.main import app
from tentalis.learning.columns import prompt_of
from tentalis.learning.options import LearnOptions
from tentalis.learning.runs import Data, prepare_run
from tentalis.learning.sources import read_rows
from tentalis.rewards.answer_judge import AnswerJudge
from tentalis.rewards.functions.scorer import FunctionScorer, load
from tentalis.rewards.scorer_file import load_scorers
from tentalis.rewards.verdict import Verdict
from tests.support import ROOT
from tests.support.examples import FOLDER, NAMES, learn_arguments
from tests.support.judge_server import judge_in_thread, says
from tests.support.loop_records import result, task

ROWS, MOST_LINES = 10, 40
XML = "<reasoning>\n6 * 4\n</reasoning>\n<answer>\n{}\n</answer>"

# Answers to the first row of each example, with the reward.
ANSWERS: dict[str, list[tuple[str, float]]] = {
    "gsm8k-trl": [
        (XML.format(24), 1.0),
        ("24", 2 * 2.5 / 3 - 1),  # no tags
        (XML.format(23), 2 * 1.0 / 3 - 1),  # the form alone
        ("many eggs", -1.0),
    ],
    "gsm8k-verl": [
        ("4 boxes of 6 eggs are 24.\n#### 24", 1.0),
        ("There are 24 eggs.", 0.5),
        ("#### 23", 0.1),  # the form alone
        ("There are 23 eggs.", 0.0),
        ("many eggs", 0.0),
    ],
    "verifiers-rubric": [
        ("The capital of France is Paris.", 1.0),
        ("paris " * 24, 0.6 + 0.3 / 2),
        ("The capital of France is Rome.", 0.4),
        ("", 0.3),
    ],
    "json-schema": [
        ('{"name": "Tom", "age": 3}', 1.0),
        ('```json\n{"name": "Tom", "age": 3}\n```', 1.0),
        ('{"name": "Tom", "age": "three"}', 0.6),
        ('{"age": -1, "colour": "red"}', 0.4),
        ("A cat named Tom.", 0.0),
    ],
}
# The dict of a `compute_score`, and the values of several functions, are components of the Score.
COMPONENTS: dict[str, dict[str, float]] = {
    "gsm8k-trl": {"correctness_reward": 1.0, "integer_reward": 1.0, "xml_reward": 1.0, "raw": 3.0},
    "gsm8k-verl": {"acc": 1.0, "format": 1.0, "steps": 1.0},
    "verifiers-rubric": {"names_answer": 1.0, "is_short": 1.0, "is_sentence": 1.0},
    "json-schema": {},
}
CONVENTIONS = {"gsm8k-trl": "trl", "gsm8k-verl": "verl", "verifiers-rubric": "verifiers", "json-schema": "trl"}


@dataclass(frozen=True)
class ExampleRun:
    """An example: `given` are the options of its command, `prompts` its rows, `scorer` its functions."""

    name: str
    given: dict[str, Any]
    prompts: tuple[Prompt, ...]
    scorer: FunctionScorer


def options_of(name: str) -> dict[str, Any]:
    """Returns the options of the command in the README, as the command line parses them."""
    command = get_command(app).commands["learn"].load()  # type: ignore[attr-defined]
    return dict(command.make_context("learn", learn_arguments(name)).params)


@pytest.fixture(scope="module", params=sorted(ANSWERS))
def example(request: pytest.FixtureRequest) -> Iterator[ExampleRun]:
    given = options_of(request.param)
    columns = dict(parse_columns(given["column"] or []))
    rows = [*read_rows(ROOT / given["prompts"])]
    assert [row.problem for row in rows] == [""] * ROWS
    prompts = tuple(prompt_of(row.values, row.number, columns)[0] for row in rows if row.values is not None)
    limits = parse_range(given["reward_range"])
    scorer = load(given["reward"], weights=given["weight"] or (), range=limits, base=ROOT)
    yield ExampleRun(request.param, given, prompts, scorer)
    scorer.close()


JUDGED = "style-judge"


def test_every_example_is_tested_and_short() -> None:
    assert sorted(each.name for each in FOLDER.iterdir() if each.is_dir()) == sorted([*ANSWERS, JUDGED])
    assert [*NAMES] == [*ANSWERS, JUDGED]
    for name in ANSWERS:
        assert len((FOLDER / name / "rewards.py").read_text(encoding="utf-8").splitlines()) < MOST_LINES


def test_the_command_names_the_folder_and_one_weight_per_function(example: ExampleRun) -> None:
    assert example.given["prompts"] == f"examples/{example.name}/prompts.jsonl"
    assert all(each.startswith(f"examples/{example.name}/rewards.py:") for each in example.given["reward"])
    assert len(example.given["weight"] or example.given["reward"]) == len(example.given["reward"])
    assert {each.convention for each in example.scorer.description.functions} == {CONVENTIONS[example.name]}


def test_every_row_has_the_columns_of_the_functions(example: ExampleRun) -> None:
    assert len(example.prompts) == ROWS and len({messages_of(prompt) for prompt in example.prompts}) == ROWS
    for prompt in example.prompts:
        of = task(messages=messages_of(prompt), verifier=verifier_of(prompt))
        example.scorer.check(of)
        assert example.scorer.verify(of, result(of, text="no answer")).reward is not None


def test_the_rewards_of_right_half_right_and_wrong_answers(example: ExampleRun) -> None:
    prompt = example.prompts[0]
    answers = ANSWERS[example.name]
    of = task(messages=messages_of(prompt), verifier=verifier_of(prompt), n=len(answers))
    verdicts = [example.scorer.verify(of, result(of, index, text=text)) for index, (text, _) in enumerate(answers)]
    assert [verdict.reward for verdict in verdicts] == [pytest.approx(reward) for _, reward in answers]
    assert verdicts[0].components == COMPONENTS[example.name]


async def graded(scorer: AnswerJudge, of: Task) -> Verdict:
    async with scorer._chat:
        return await scorer.judge(of, result(of, text="Keep it in a linen bag."))


def test_the_judge_of_an_example_grades_by_its_criterion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options_of(JUDGED)
    assert given["prompts"] == f"examples/{JUDGED}/prompts.jsonl" and not given["reward"]
    monkeypatch.chdir(ROOT)
    rows = [*read_rows(Path(given["prompts"]))]
    assert [row.problem for row in rows] == [""] * ROWS
    criterion = criterion_of(given["criterion"])
    assert criterion is not None and criterion.startswith("The answer is one friendly sentence")
    prompt, _ = prompt_of(rows[0].values or {}, 1)
    of = task(messages=messages_of(prompt), verifier=verifier_of(prompt))
    with judge_in_thread([says("short and kind \\boxed{8}")]) as server:
        options = LearnOptions(given["prompts"], (), judge=server.url, judge_model="judge", criterion=criterion, seed=1)
        prepare_run(tmp_path, options, Data(Path(given["prompts"]), None), print)
        ((_, _, scorer),) = load_scorers(tmp_path / "scorers.yaml")
        assert isinstance(scorer, AnswerJudge)
        scorer.check(of)
        verdict = asyncio.run(graded(scorer, of))
    assert verdict.reward == 0.8
    asked = server.asked[0]["messages"][1]["content"]
    assert criterion in asked and "Keep it in a linen bag." in asked and prompt.messages[-1][1] in asked
