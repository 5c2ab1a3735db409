"""The run that `tentalis up` trains: a new one, or the newest of the state directory without an end."""

from pathlib import Path

import pytest
import yaml

from tentalis.agents.scenarios import make_scenario
from tentalis.cli import up
from tentalis.cli.shared.trainer_changes import configured
from tentalis.demo.runs import RunKind, trainer_config
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
