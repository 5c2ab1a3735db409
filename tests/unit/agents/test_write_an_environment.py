"""The page docs/how-to/write-an-environment.md, executed: the file it shows is installed, found, and played."""

import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tentalis import rewards
from tentalis.agents.environments.registry import EnvironmentEntry, known_environments
from tentalis.cli.main import app
from tentalis.rewards import registry

PAGE = Path(__file__).parents[3] / "docs/how-to/write-an-environment.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, project = (re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)[0] for kind in ("python", "toml"))
    (tmp_path / "guess.py").write_text(code)
    metadata = tmp_path / "guess-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guess\nVersion: 1.0\n")
    points = project.replace('[project.entry-points."tentalis.environments"]', "[tentalis.environments]")
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


@pytest.mark.usefixtures("installed")
def test_the_environment_of_the_page_is_found_and_played(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnvironmentEntry("guess", "guess (guess:Guess)") in known_environments()
    turns = "\n\n".join(["no number", *map(str, range(100))])
    played = CliRunner().invoke(app, ["env", "try", "guess", "Begin.", "--max-turns", "101"], input=turns + "\n\n")
    assert played.exit_code == 0, played.output
    assert "[user]\nSay a number." in played.output and "[user]\nhigher" in played.output
    assert re.search(r"\[score\] reward 0\.\d+", played.output)
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(registry.ENVIRONMENTS))
    registry.load_plugins.cache_clear()
    rewards.check_environment("guess")
    assert list(registry.ENVIRONMENTS["guess"]) == ["episode"]


def test_an_unknown_environment_is_refused() -> None:
    refused = CliRunner().invoke(app, ["env", "try", "nowhere", "Begin."])
    assert refused.exit_code == 2 and "tentalis env list" in refused.output
