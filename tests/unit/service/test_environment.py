"""Variables that are set under a name that nobody reads."""

import pytest
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.service.environment import misspelt
from tentalis.service.variables import LISTED


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TENTALIS_MARKER_TLL", "TENTALIS_MARKER_TTL"),
        ("TENTALIS_HOEM", "TENTALIS_HOME"),
        ("TENTALIS_BOOTSTRAP_SERVERS", "TENTALIS_BOOTSTRAP"),
        ("TENTALIS_DEADRUN", "TENTALIS_DEAD_RUN"),
        ("TENTALIS_METRIC_PORT", "TENTALIS_METRICS_PORT"),
    ],
)
def test_a_misspelt_name_is_said_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert misspelt({name: "5", meant: "6"}) == [f"{name} is set, but unknown: did you mean {meant}?"]


def test_of_what_is_ours_and_of_what_is_somebody_elses_nothing_is_said() -> None:
    ours = {each.name: "1" for each in LISTED}
    links = {"TENTALIS_SERVER_PORT": "tcp://10.0.0.1:8000", "TENTALIS_METRICS_SERVICE_HOST": "10.0.0.1"}
    assert misspelt(ours | links | {"TENTALIS_JUDGE_KEY": "x", "PATH": "/bin"}) == []


def test_every_command_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_MARKER_TLL", "5")
    done = CliRunner().invoke(app, ["version", "-o", "json"])
    assert done.exit_code == 0
    assert "TENTALIS_MARKER_TLL is set, but unknown: did you mean TENTALIS_MARKER_TTL?" in done.stderr
