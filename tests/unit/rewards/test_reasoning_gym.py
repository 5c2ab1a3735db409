"""The verifier reasoning_gym on every data set of the library, with entries as they come from the log: as JSON."""

import json
import warnings
from typing import Any

import pytest

from schemas.records import Verifier
from tentalis.rewards import registry
from tests.support.stream_records import make_result, make_task

ORACLES = ("possible_answer", "example_correct_answer", "example_answer")
WITHOUT_ORACLE = {"boxnet", "rush_hour"}
"""Data sets whose entries state no answer: their scorers try the moves of any answer."""


def reward_of(dataset: str, entry: dict[str, Any], answer: str, environment: str = "math") -> float | None:
    data = json.dumps({"dataset": dataset, "entry": entry})
    task = make_task(environment=environment, verifier=Verifier(name="reasoning_gym", data=data))
    return registry.verify(task, make_result(task, text=answer)).reward


def answer_of(entry: dict[str, Any]) -> str:
    if entry["answer"] is not None:
        return str(entry["answer"])
    found = next(entry["metadata"][key] for key in ORACLES if key in entry["metadata"])
    return found if isinstance(found, str) else json.dumps(found)


MADE_HARD_BY_JSON = ("arc_agi", "rearc")
WITH_FULL_STOPS = ("emoji_mystery", "sentence_reordering")
WRONG = "<answer>zz</answer>"


def entry_of(dataset: str) -> dict[str, Any]:
    """Returns an entry of a data set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym

        entry: dict[str, Any] = reasoning_gym.create_dataset(dataset, size=1, seed=7)[0]
    return entry


def right_and_wrong(dataset: str) -> tuple[float | None, float | None]:
    entry = entry_of(dataset)
    right = f"<step>I work.</step><answer>{answer_of(entry)}</answer>" if dataset not in WITHOUT_ORACLE else WRONG
    return reward_of(dataset, entry, right, "llm"), reward_of(dataset, entry, WRONG)


@pytest.mark.parametrize("dataset", [*MADE_HARD_BY_JSON, *WITH_FULL_STOPS, "graph_color", "chain_sum"])
def test_a_right_answer_has_reward_1_and_a_wrong_one_less(dataset: str) -> None:
    right, wrong = right_and_wrong(dataset)
    assert right == 1.0 and wrong is not None and wrong < 0.1


@pytest.mark.long
def test_every_data_set_of_the_library_tells_right_from_wrong() -> None:
    from reasoning_gym.factory import DATASETS

    graded = {name: right_and_wrong(name) for name in DATASETS if name != "composite"}
    assert len(graded) > 100
    assert {name for name, (right, _) in graded.items() if right != 1.0} == WITHOUT_ORACLE
    # This scorer takes every answer that is not "true" for "false", which is the answer here.
    assert {name for name, (_, wrong) in graded.items() if wrong == 1.0} <= {"game_of_life_halting"}
    # This scorer fails on text, so that the reward is unknown.
    assert {name for name, (_, wrong) in graded.items() if wrong is None} <= {"prime_factorization"}


def test_an_entry_of_a_composite_is_scored_by_its_source() -> None:
    entry = entry_of("chain_sum")
    assert entry["metadata"]["source_dataset"] == "chain_sum"
    assert reward_of("composite", entry, f"<answer>{entry['answer']}</answer>") == 1.0
    assert reward_of("composite", entry, "<answer>x</answer>") == 0.0


def test_only_a_full_stop_of_the_reference_is_part_of_the_answer() -> None:
    sentence, number = entry_of("sentence_reordering"), entry_of("chain_sum")
    assert sentence["answer"].endswith(".")
    assert reward_of("sentence_reordering", sentence, f"The answer is {sentence['answer']}") == 1.0
    assert reward_of("chain_sum", number, f"The answer is {number['answer']}.") == 1.0
