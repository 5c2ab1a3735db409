"""The scenario over a file of prompts: any prompt by its number, in an order that never changes."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Message
from tentalis.agents.scenarios.permutation import permuted
from tentalis.agents.scenarios.prompt_file import BadPrompts, Prompt, PromptFile, PromptWriter
from tentalis.agents.scenarios.prompts import HELD_OUT, TRAINED, PromptScenario, PromptSet
from tests.support.prompt_sets import prompts, written


@given(count=st.integers(1, 700), key=st.integers() | st.text())
def test_the_order_has_each_item_once(count: int, key: int | str) -> None:
    assert sorted(permuted(place, count, key) for place in range(count)) == list(range(count))


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_outside_is_refused(place: int) -> None:
    with pytest.raises(IndexError):
        permuted(place, 5, "key")


def test_orders_differ_by_key_and_are_the_same_for_ever() -> None:
    orders = {key: [permuted(place, 10, "order", key) for place in range(10)] for key in range(20)}
    assert len({tuple(order) for order in orders.values()}) >= 19
    assert orders[0] == [8, 4, 5, 1, 0, 9, 3, 6, 2, 7], "a change here changes the questions of every run"
    first = [permuted(0, 50, key) for key in range(500)]
    assert len({*first}) > 45, "every item may come first"


def test_tens_of_millions_need_no_memory() -> None:
    assert len({permuted(place, 50_000_000, "order", 0) for place in range(2000)}) == 2000


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1, max_size=20))
def test_any_prompt_is_read_by_its_number(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("file")
    made = [Prompt((("user", text),), {"n": n}, n + 1) for n, text in enumerate(texts)]
    with PromptWriter(folder, "p") as writer:
        for prompt in made:
            writer.add(prompt.as_line())
    file = PromptFile(folder, "p")
    assert file.count == writer.count == len(texts)
    assert [file.prompt(number) for number in reversed(range(file.count))] == made[::-1]
    file.close()


@pytest.mark.parametrize("damage", ["shorter", "longer", "index", "gone", "empty index"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    written(tmp_path, prompts(5))
    data, index = tmp_path / "prompts.jsonl", tmp_path / "prompts.offsets"
    match damage:
        case "shorter":
            os.truncate(data, data.stat().st_size - 1)
        case "longer":
            data.write_bytes(data.read_bytes() + b"x")
        case "index":
            os.truncate(index, 16)
        case "gone":
            index.unlink()
        case "empty index":
            os.truncate(index, 0)
    with pytest.raises(BadPrompts, match=r"egin a new run"):
        PromptScenario(tmp_path)


def test_another_line_of_the_same_length_is_found_by_the_digest(tmp_path: Path) -> None:
    folder = written(tmp_path, prompts(5), prompts(2, "h"))
    PromptScenario(folder).check()
    for name in (TRAINED, HELD_OUT):
        path = folder / f"{name}.jsonl"
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1", b"7", 1))
        with pytest.raises(BadPrompts, match=f"{name}.jsonl was changed"):
            PromptScenario(folder).check()
        path.write_bytes(before)


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, prompts(1), prompts(1))
    path = folder / "prompts.jsonl"
    path.write_bytes(b"{" * (path.stat().st_size - 1) + b"\n")
    with pytest.raises(BadPrompts, match="line 1, is damaged"):
        PromptScenario(folder).question("r", 0)


def test_held_out_prompts_are_never_asked_and_every_other_is_asked_once_a_lap(tmp_path: Path) -> None:
    scenario = PromptScenario(written(tmp_path, prompts(30), held_out=3))
    held_out = {prompt.line for prompt in scenario.held_out(100)}
    assert len(held_out) == 3
    laps = [[scenario.question("r", lap * 27 + place).metadata["line"] for place in range(27)] for lap in range(3)]
    for lap in laps:
        assert {int(line) for line in lap} == {*range(1, 31)} - held_out and len(lap) == 27
    assert len({tuple(lap) for lap in laps}) == 3, "each lap has an order of its own"
    assert [prompt.line for prompt in scenario.trained(100)] == [int(line) for line in laps[0]]
    assert scenario.showcase == tuple(
        (Message(role="user", content=f"q{prompt.line - 1}"),) for prompt in scenario.held_out(3)
    )


def test_a_file_of_held_out_prompts_takes_none_of_the_others(tmp_path: Path) -> None:
    scenario = PromptScenario(written(tmp_path, prompts(10), prompts(4, "h")))
    assert {scenario.question("r", place).metadata["line"] for place in range(10)} == {str(n) for n in range(1, 11)}
    assert {prompt.messages[0][1] for prompt in scenario.held_out(9)} == {"h0", "h1", "h2", "h3"}
    assert scenario.held_out(2) == scenario.held_out(9)[:2]


def test_a_question_carries_its_columns_and_its_origin(tmp_path: Path) -> None:
    scenario = PromptScenario(
        written(tmp_path, [Prompt((("system", "s"), ("user", "ü")), {"answer": "ä"}, 8)], prompts(1))
    )
    question = scenario.question("r", 0)
    assert question.messages == (Message(role="system", content="s"), Message(role="user", content="ü"))
    assert question.verifier.name == "reward" and json.loads(question.verifier.data) == {"columns": {"answer": "ä"}}
    assert question.metadata == {"prompts": scenario.set.sha256, "line": "8"}
    assert (scenario.n_samples, scenario.sampling.max_tokens, scenario.sampling.temperature) == (4, 32, 0.7)
    assert scenario.terms.opd is None and not scenario.owes_feedback


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    def lines(folder: str, seed: int, run: str = "r") -> list[str]:
        scenario = PromptScenario(written(tmp_path / folder, prompts(40), held_out=4, seed=seed))
        return [scenario.question(run, index).metadata["line"] for index in range(36)]

    assert lines("a", 0) == lines("b", 0, "another run")
    assert lines("a", 0) != lines("c", 1)
    first, other = (PromptScenario(tmp_path / folder).held_out(4) for folder in ("a", "c"))
    assert {prompt.line for prompt in first} != {prompt.line for prompt in other}


def test_a_folder_without_a_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPrompts, match="not a folder of prompts"):
        PromptScenario(tmp_path)
    folder = written(tmp_path / "x", prompts(3))
    replace(PromptSet.read(folder), prompts=4).write(folder)
    with pytest.raises(BadPrompts, match="3 prompts instead of 4"):
        PromptScenario(folder)
