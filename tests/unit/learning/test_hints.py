"""Hints of a function or a column: who gives them, which loss reads them, and that a failure costs one hint."""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.records import Feedback, Result, Source, Status
from tentalis.agents.scenarios.prompts import PromptScenario, messages_of, verifier_of
from tentalis.demo.runs import unchanged, unused_applications
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions, Loss
from tentalis.learning.runs import Data, LearnRun, begin, continued
from tentalis.opd.config import load_hinters
from tentalis.opd.hint_function import HintFunction
from tentalis.opd.hinters import GivenHinter
from tentalis.opd.wiring import make_hinters
from tentalis.rewards.verdict import ScorerAway
from tentalis.service.lifecycle import Unmendable
from tests.support.loop_records import result, task

FUNCTIONS = """
import os

def score(completions, **columns):
    return [0.5] * len(completions)

def hint(completions, topic, **columns):
    text = completions[0]
    if text == "fail":
        raise ValueError("no hint today")
    if text == "exit":
        os._exit(1)
    return [{"short": None, "number": 3}.get(text, f"Name {topic[0]}, please")]
"""


class Place:
    """A folder with prompts and functions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "f.py").write_text(FUNCTIONS, encoding="utf-8")
        self.rows([{"prompt": f"q{n}", "topic": f"t{n}", "said": f"Say {n}"} for n in range(6)])
        self.options = LearnOptions(str(folder / "p.jsonl"), (f"{folder / 'f.py'}:score",), steps=1)

    def rows(self, rows: list[Any]) -> None:
        (self.folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def begin(self, hint: str | None, loss: Loss | None = None, said: list[str] | None = None) -> LearnRun:
        options = replace(self.options, hint=hint and hint.replace("f.py", str(self.folder / "f.py")), loss=loss)
        runs, data = self.folder / "runs", Data(self.folder / "p.jsonl", None)
        remark = [].append if said is None else said.append
        return begin(runs, options, data, 0.0, unchanged, lambda: Path("/models/tiny"), remark)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def feedback(scenario: PromptScenario, text: str, **more: Any) -> tuple[Result, Feedback]:
    prompt = scenario.trained(1)[0]
    of = task(messages=messages_of(prompt), verifier=verifier_of(prompt)).model_copy(update={"terms": scenario.terms})
    answer = result(of, text=text).model_copy(update=more)
    return answer, scenario.feedback(answer, "feedback", 1)


@pytest.mark.parametrize(
    ("hint", "loss", "weights", "opd"),
    [
        (None, None, (1.0, 0.0), None),
        ("f.py:hint", None, (1.0, 1.0), Source.MANAGER),
        ("said", "opd", (0.0, 1.0), Source.MANAGER),
        (None, "rl", (1.0, 0.0), None),
    ],
)
def test_the_loss_follows_from_what_is_given(
    place: Place, hint: str | None, loss: Loss | None, weights: tuple[float, float], opd: Source | None
) -> None:
    run = place.begin(hint, loss)
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))["loss"]
    assert (config["rl_weight"], config["opd_weight"]) == weights and config["dynamic_sampling"] is True
    assert unused_applications(run.config) == (frozenset() if opd else {"hinting"})
    scenario = PromptScenario(run.prompts)
    assert (scenario.terms.opd, scenario.owes_feedback) == (opd, opd is not None)
    assert run.hinters.exists() == (opd is not None)


def test_the_hint_of_a_function_becomes_the_text_of_feedback(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    run = place.begin("f.py:hint")
    scenario = PromptScenario(run.prompts)
    topic = scenario.trained(1)[0].columns["topic"]
    answer, given = feedback(scenario, "long")
    assert given.text == f"Name {topic}, please" and given.source is Source.MANAGER
    hinters = make_hinters(load_hinters(run.hinters))
    assert isinstance(hinters["*"], GivenHinter)
    assert asyncio.run(hinters["*"].propose(given, answer)).hints == (given.text,)
    assert feedback(scenario, "short")[1].text == ""
    assert feedback(scenario, "long", status=Status.FAILED)[1].text == ""
    with caplog.at_level(logging.WARNING):
        assert feedback(scenario, "fail")[1].text == "" == feedback(scenario, "number")[1].text
    assert f"{place.folder / 'f.py'}:10" in caplog.text and "no hint today" in caplog.text
    assert "it must return a text, or None for none" in caplog.text


def test_the_hint_of_a_column_is_for_every_answer(place: Place) -> None:
    place.rows(
        [{"prompt": "a", "said": "Say a"}, {"prompt": "b", "said": None}, {"prompt": "c"}, {"prompt": "d", "said": 1}]
    )
    said: list[str] = []
    scenario = PromptScenario(place.begin("said", said=said).prompts)
    texts = {prompt.messages[-1][1]: prompt.columns["said"] for prompt in scenario.held_out(1) + scenario.trained(1)}
    assert texts == {"a": "Say a", "b": None}
    assert "line 3: no column said, which --hint names" in said[0] and "line 4: the hint in the column said" in said[0]
    assert feedback(scenario, "any")[1].text == (scenario.trained(1)[0].columns["said"] or "")


def test_hints_are_refused_before_anything_starts(place: Place) -> None:
    for hint, loss, words in (
        (None, "opd", "--loss opd trains on hints: name a function or a column with --hint"),
        ("said", "rl", "--loss rl reads no hints: leave --hint out, or give --loss opd or both"),
        ("f.py:hunt", None, "the hint function cannot be used: .*hunt"),
        ("other.py:hint", None, "--hint other.py:hint: there is no file"),
        ("nobody", None, "no column nobody, which --hint names"),
    ):
        with pytest.raises(LearnError, match=words):
            place.begin(hint, loss)  # type: ignore[arg-type]


def test_a_run_with_another_hint_function_is_not_continued(place: Place) -> None:
    run, data = place.begin("f.py:hint"), Data(place.folder / "p.jsonl", None)
    assert continued(run, data) == run
    # The reward function is in another file, which does not change.
    described = run.folder / "learn.json"
    values = json.loads(described.read_text(encoding="utf-8"))
    described.write_text(json.dumps(values | {"hinter": "f.py:hint/0123"}), encoding="utf-8")
    with pytest.raises(LearnError, match="the hint function has changed"):
        continued(run, data)


CHANGED = "the hint function .*f.py:hint has changed since the run began. .* --new"


def test_a_manager_that_starts_again_refuses_a_changed_hint_function(place: Place) -> None:
    run, file = place.begin("f.py:hint"), place.folder / "f.py"
    for source, words in (
        (FUNCTIONS.replace("please", "now"), CHANGED),
        (FUNCTIONS + "(", r"the hint function .*f.py:hint cannot be used: .*f\.py:14: .* --new"),
        (FUNCTIONS.replace("def hint", "def hunt"), "cannot be used: .*has no hint"),
    ):
        file.write_text(source, encoding="utf-8")
        with pytest.raises(Unmendable, match=words):
            feedback(PromptScenario(run.prompts), "long")
    file.write_text(FUNCTIONS, encoding="utf-8")
    assert feedback(PromptScenario(run.prompts), "long")[1].text


def test_a_hint_function_that_changes_in_a_run_ends_it_once_its_process_must_start_again(place: Place) -> None:
    scenario = PromptScenario(place.begin("f.py:hint").prompts)
    before = feedback(scenario, "long")[1].text
    (place.folder / "f.py").write_text(FUNCTIONS.replace("please", "now"), encoding="utf-8")
    assert feedback(scenario, "long")[1].text == before, "its process has the earlier function"
    with pytest.raises(Unmendable, match=CHANGED):
        feedback(scenario, "exit")


def test_an_unchanged_hint_function_whose_process_did_not_start_is_made_anew(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = PromptScenario(place.begin("f.py:hint").prompts)
    before, hint, times = feedback(scenario, "long")[1].text, HintFunction.hint, 1

    def failing(function: HintFunction, of: Result) -> str | None:
        nonlocal times
        times -= 1
        if times >= 0:
            raise ScorerAway("no memory for another process")
        return hint(function, of)

    monkeypatch.setattr(HintFunction, "hint", failing)
    assert feedback(scenario, "long")[1].text == before
    times = 2
    with pytest.raises(ScorerAway):
        feedback(scenario, "long")
