"""The folder of a run: prepared once, continued with the same data and function only."""

import io
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tentalis.agents.manager.curriculum import SolveRateRule
from tentalis.agents.scenarios.prompt_file import BadPrompts
from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.demo.runs import unchanged, whole_models
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions
from tentalis.learning.prepare import copy_stdin, held_out_count, source_digest, unusable_file
from tentalis.learning.runs import Data, LearnRun, begin, continued, kind_of, unfinished

REWARD = "def score(completions, answer, **columns):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"


class Place:
    """A folder with prompts and a reward function, and the runs of a state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "home" / "runs"
        self.runs.mkdir(parents=True)
        self.source, self.reward = folder / "prompts.jsonl", folder / "rewards.py"
        self.reward.write_text(REWARD, encoding="utf-8")
        self.rows([{"prompt": f"q{n}", "answer": str(n)} for n in range(20)])
        self.options = LearnOptions(str(self.source), (f"{self.reward}:score",), steps=3)
        self.said: list[str] = []

    def rows(self, rows: list[Any]) -> None:
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    @property
    def data(self) -> Data:
        return Data(self.source, None if self.options.held_out is None else Path(self.options.held_out))

    def begin(self, now: float = 0.0, model: Callable[[], Path] = lambda: Path("/models/tiny")) -> LearnRun:
        return begin(self.runs, self.options, self.data, now, unchanged, model, self.said.append)

    def found(self) -> LearnRun | None:
        return unfinished(self.runs, kind_of(self.options))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_run_has_its_prompts_its_scorers_and_the_trainers_settings(place: Place) -> None:
    run = place.begin()
    assert run.run_id == run.folder.name == "learn-19700101-000000"
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert (config["run_id"], config["policy"], config["steps"]) == (run.run_id, "learn", 3)
    assert (config["batch_rollouts"], config["loss"]["opd_weight"], config["loss"]["dynamic_sampling"]) == (
        32,
        0.0,
        True,
    )
    scorers = yaml.safe_load(run.scorers.read_text(encoding="utf-8"))
    assert scorers["environments"]["chat"]["reward"]["target"] == [f"{place.reward}:score"]
    scenario = PromptScenario(run.prompts)
    assert (scenario.set.prompts, scenario.set.held_out, scenario.n_samples) == (20, 2, 8)
    assert place.said == ["18 prompts to train on; a tenth is held out (2 prompts), because --eval names no other ones"]
    assert [path.name for path in place.runs.iterdir()] == [run.run_id]
    assert whole_models(run.config) == 5, "three are kept, one is tried, one is loaded"


def test_the_same_options_continue_it_and_others_do_not(place: Place) -> None:
    assert place.found() is None
    run = place.begin()
    found = place.found()
    assert found == LearnRun(run.run_id, run.folder, resumed=True)
    assert continued(found, place.data) == found
    for changes in ({"steps": 4}, {"group": 4}, {"columns": (("a", "b"),)}, {"seed": 1}, {"changes": ("loss=dapo",)}):
        assert unfinished(place.runs, kind_of(replace(place.options, **changes))) is None
    run.finish()
    assert place.found() is None
    assert place.begin().run_id == "learn-19700101-000001"


def test_another_curriculum_is_refused_and_the_same_one_continues(place: Place) -> None:
    plain = place.begin()
    place.options = replace(place.options, curriculum=True, reward_range=(0.0, 10.0))
    assert place.found() is None, "the range differs too: this is another run"
    place.options = replace(place.options, reward_range=None)
    with pytest.raises(LearnError, match=rf"{plain.run_id}, .* without --curriculum: leave it out.*--new"):
        place.found()
    chosen = place.begin()
    assert (found := place.found()) is not None and found.run_id == chosen.run_id
    assert plain.curriculum is None and chosen.curriculum == SolveRateRule(lowest=0.0)
    plain.finish()
    place.options = replace(place.options, curriculum=False)
    with pytest.raises(LearnError, match=rf"{chosen.run_id}, .* with --curriculum: give it again.*--new"):
        place.found()


def test_the_curriculum_of_a_run_stays_that_of_its_beginning(place: Place) -> None:
    place.options = replace(place.options, curriculum=True)
    run = place.begin()
    file = run.folder / "learn.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    described["kind"]["curriculum"]["probe"] = 0.5  # the default of another version
    file.write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(LearnError, match=r"other settings of the curriculum, those of another version.*--new"):
        place.found()
    del described["kind"]["curriculum"]  # a run of a version without it
    file.write_text(json.dumps(described), encoding="utf-8")
    place.options = replace(place.options, curriculum=False)
    assert place.found() == LearnRun(run.run_id, run.folder, resumed=True) and run.curriculum is None


def test_a_curriculum_needs_rewards_that_train(place: Place) -> None:
    place.options = replace(place.options, curriculum=True, hint="answer", loss="opd")
    with pytest.raises(LearnError, match="--curriculum chooses prompts by their rewards"):
        place.begin()


def test_changed_data_is_refused(place: Place) -> None:
    run = place.begin()
    place.rows([{"prompt": "other", "answer": "1"}] * 20)
    with pytest.raises(LearnError, match=f"prompts.jsonl has changed since run {run.run_id} began.*--new"):
        continued(run, place.data)


def test_a_changed_file_of_held_out_prompts_is_refused(place: Place) -> None:
    held_out = place.folder / "held.jsonl"
    held_out.write_text('{"prompt": "h", "answer": "1"}\n', encoding="utf-8")
    place.options = replace(place.options, held_out=str(held_out))
    run = place.begin()
    assert place.said == ["20 prompts to train on, 1 held-out prompts"]
    assert [prompt.messages for prompt in PromptScenario(run.prompts).held_out(5)] == [(("user", "h"),)]
    continued(run, place.data)
    held_out.write_text('{"prompt": "i", "answer": "1"}\n', encoding="utf-8")
    with pytest.raises(LearnError, match=r"held\.jsonl has changed"):
        continued(run, place.data)


def test_a_changed_reward_function_is_refused(place: Place) -> None:
    run = place.begin()
    place.reward.write_text(REWARD.replace("float(a in c)", "float(a in c) / 2"), encoding="utf-8")
    with pytest.raises(LearnError, match=r"the reward function has changed since run .* --new"):
        continued(run, place.data)


def test_changed_prepared_prompts_are_refused(place: Place) -> None:
    run = place.begin()
    prepared = run.prompts / "prompts.jsonl"
    prepared.write_bytes(prepared.read_bytes().replace(b"q1", b"q9", 1))
    with pytest.raises(BadPrompts, match="was changed after the run began"):
        continued(run, place.data)


def test_unusable_rows_are_named_counted_and_listed(place: Place) -> None:
    place.rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"answer": "1"}, 7] + [{"prompt": "c"}] * 20)
    with place.source.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "d", "answer": "2"}\n')
    run = place.begin()
    assert PromptScenario(run.prompts).set.prompts == 2
    lines = place.said[0].splitlines()
    assert lines[0] == f"{place.source}: 23 of 25 rows cannot be used:"
    assert lines[1].startswith("  line 2: score of ") and lines[1].endswith("rewards.py:1 needs the column answer")
    assert lines[2].startswith("  line 3: neither a prompt nor messages")
    assert lines[3] == "  line 4: not a JSON object but int"
    assert len(lines) == 12
    assert lines[-1] == f"  and 13 more, in {unusable_file(run.prompts, 'prompts')}", (
        "the folder has been renamed since"
    )
    listed = unusable_file(run.prompts, "prompts").read_text(encoding="utf-8").splitlines()
    assert len(listed) == 23 and json.loads(listed[0])["line"] == 2


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "none of its 0 rows can be used as a prompt$"),
        ([{"question": "a"}], r"none of its 1 rows can be used as a prompt:\n  line 1: neither a prompt"),
        ([{"prompt": "a", "answer": "1"}], "one usable prompt: .* --eval"),
    ],
)
def test_too_few_prompts_are_an_error_before_anything_starts(place: Place, rows: list[Any], reason: str) -> None:
    place.rows(rows)

    def model() -> Path:
        raise AssertionError("the model is not needed yet")

    with pytest.raises(LearnError, match=reason):
        place.begin(model=model)
    assert place.found() is None


def test_a_run_that_was_interrupted_before_it_began_is_prepared_again(place: Place) -> None:
    def model() -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.begin(model=model)
    assert place.found() is None and [*place.runs.iterdir()] == [], "the copy of the data is removed"
    run = place.begin()
    assert place.found() is not None and [path.name for path in place.runs.iterdir()] == [run.run_id]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("rewards:score", "name a file and a function"),
        ("missing.py:score", "no file missing.py"),
        ("x.py:a b", "name a"),
    ],
)
def test_a_reward_that_names_no_function_in_a_file(target: str, reason: str) -> None:
    with pytest.raises(LearnError, match=reason):
        kind_of(LearnOptions("p.jsonl", (target,)))


def test_a_function_that_is_missing_in_the_file_is_named(place: Place) -> None:
    place.options = replace(place.options, rewards=(f"{place.reward}:nothing",))
    with pytest.raises(LearnError, match=rf"the reward function cannot be used: {place.reward} has no nothing; it has"):
        place.begin()


def test_a_full_disk_is_named_with_the_folder(place: Place) -> None:
    place.rows([{"prompt": "a" * 500, "answer": "1"}] * 200)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # as `ulimit -f`
    try:
        with pytest.raises(LearnError, match=r"prompts: File too large: the data are copied there.*TENTALIS_HOME"):
            place.begin()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*place.runs.iterdir()] == []


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_description_of_a_run_is_named(place: Place, text: str) -> None:
    run = place.begin()
    (run.folder / "learn.json").write_text(text, encoding="utf-8")
    with pytest.raises(LearnError, match=f"{run.folder}/learn.json is damaged .* --new"):
        place.found()


def test_weights_range_and_limits_reach_the_file_of_scorers(place: Place) -> None:
    place.options = replace(
        place.options,
        rewards=place.options.rewards * 2,
        weights=(0.5, 2.0),
        reward_range=(0.0, 10.0),
        reward_seconds=3.0,
        reward_memory_mb=512,
    )
    settings = yaml.safe_load(place.begin().scorers.read_text(encoding="utf-8"))["environments"]["chat"]["reward"]
    assert settings == {
        "kind": "function",
        "target": [f"{place.reward}:score"] * 2,
        "weights": [0.5, 2.0],
        "range": [0.0, 10.0],
        "time_limit_s": 3.0,
        "memory_mb": 512,
    }


def test_standard_input_is_copied_and_a_terminal_refused(tmp_path: Path) -> None:
    copied = copy_stdin(tmp_path / "in.jsonl", io.BytesIO(b'{"prompt": "a"}\n'))
    assert copied.read_bytes() == b'{"prompt": "a"}\n'

    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    with pytest.raises(LearnError, match="pipe JSONL"):
        copy_stdin(tmp_path / "in.jsonl", Terminal())


def test_the_digest_of_a_folder_covers_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    seen = set()
    for name, content in (("a", "1"), ("a", "2"), ("b", "2")):
        for old in folder.iterdir():
            old.unlink()
        (folder / name).write_text(content, encoding="utf-8")
        seen.add(source_digest(folder))
    assert len(seen) == 3


@pytest.mark.parametrize(("prompts", "expected"), [(2, 1), (19, 1), (20, 2), (105, 10)])
def test_a_tenth_is_held_out_and_at_least_one(prompts: int, expected: int) -> None:
    assert held_out_count(prompts, Path("p")) == expected
