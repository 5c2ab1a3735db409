"""The run that `tentalis up` trains: a new one, or the newest of the state directory without an end."""

import json
from pathlib import Path

import pytest
import yaml

from tentalis.agents.scenarios import make_scenario
from tentalis.cli import up
from tentalis.cli.shared.trainer_changes import configured
from tentalis.demo.runs import RunKind, trainer_config
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions
from tentalis.learning.runs import Data, begin
from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_decision import judge
from trainer.config.conversation import ANCHOR
from trainer.config.file import load_config
from trainer.config.trainer_config import TrainerConfig


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(up, "prepared_model", lambda named, cache: Path(named or "/m/base"))
    return tmp_path / "runs"


def standing(runs: Path) -> TrainerConfig:
    _, path, environment = up._standing_run(runs, "/m/base", runs)
    assert environment == "chat"
    return load_config(path)


def learnt(runs: Path, tmp_path: Path, changes: tuple[str, ...] = ()) -> Path:
    """Begins a run of `tentalis learn` and returns its folder."""
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    prompts.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(4)))
    reward.write_text("def score(completion: str) -> float:\n    return float(len(completion))\n")
    options = LearnOptions(source=str(prompts), rewards=(f"{reward}:score",), steps=1, changes=changes)
    return begin(runs, options, Data(prompts, None), 0.0, configured, lambda: Path("/m/base"), print).folder


def test_a_new_run_is_guarded_and_held_near_the_base_model(runs: Path) -> None:
    config = standing(runs)
    assert (config.steps, config.promotion, config.loss.kl) == (None, "guarded", ANCHOR)


@pytest.mark.parametrize(
    ("changes", "coef"),
    [((), ANCHOR.coef), (("optimizer.grad_clip=0.5",), ANCHOR.coef), (("loss.kl.coef=0.5",), 0.5)],
)
def test_a_run_of_the_demo_continues_in_the_same_way(runs: Path, changes: tuple[str, ...], coef: float) -> None:
    kind = RunKind("assistant", 3, "/m/base")
    config = configured(trainer_config("demo-1", kind, make_scenario("assistant", None)), changes)
    (runs / "demo-1").mkdir(parents=True)
    (runs / "demo-1" / "config.yaml").write_text(yaml.safe_dump(config))
    found = standing(runs)
    assert (found.run_id, found.steps, found.promotion, found.loss.kl.coef) == ("demo-1", None, "guarded", coef)


@pytest.mark.parametrize(
    ("changes", "promotion"),
    [
        ((), "guarded"),
        (("optimizer.grad_clip=0.5",), "guarded"),
        (("promotion=always",), "always"),
        (("promotion=manual",), "manual"),
    ],
)
def test_a_run_of_learn_trains_guarded_unless_the_user_has_set_its_promotion(
    runs: Path, tmp_path: Path, changes: tuple[str, ...], promotion: str
) -> None:
    learnt(runs, tmp_path, changes)
    assert standing(runs).promotion == promotion


@pytest.mark.parametrize(("changes", "least"), [((), 0.0), (("guard.min_length=2",), 2.0)])
def test_short_answers_that_learn_has_taught_are_no_collapse(
    runs: Path, tmp_path: Path, changes: tuple[str, ...], least: float
) -> None:
    learnt(runs, tmp_path, changes)
    limits = standing(runs).guard
    assert limits == GuardLimits(min_length=least)
    assert judge(GuardEvidence(answers=16, length=2.0), limits) == []


def test_a_run_of_learn_whose_options_are_unknown_is_refused(runs: Path, tmp_path: Path) -> None:
    (learnt(runs, tmp_path) / "learn.json").write_text("{")
    with pytest.raises(LearnError, match=r"learn.json is damaged .*which settings of run learn-1970.*--config"):
        standing(runs)
