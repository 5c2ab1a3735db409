"""The page docs/how-to/write-an-environment.md, executed: the file it shows is installed, found, and played."""

import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tentalis.agents.environments.registry import EnvironmentEntry, known_environments
from tentalis.cli.main import app
from tentalis.rewards import registry
from tests.support.environment_pages import install_guess


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_guess(tmp_path)
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
    registry.check_environment("guess")
    assert list(registry.ENVIRONMENTS["guess"]) == ["episode"]


@pytest.mark.usefixtures("installed")
def test_saying_numbers_is_rewarded_before_the_right_one_is_found() -> None:
    """A group in which no one finds the number still has different rewards, from which a policy learns."""
    played = CliRunner().invoke(app, ["env", "try", "guess", "Begin."], input="none\n\nI say 999\n\nnone\n\nnone\n\n")
    assert played.exit_code == 0, played.output
    assert "[score] reward 0.025" in played.output


def test_an_unknown_environment_is_refused() -> None:
    refused = CliRunner().invoke(app, ["env", "try", "nowhere", "Begin."])
    assert refused.exit_code == 2 and "tentalis env list" in refused.output
