"""The curriculum of a run: the manager gets the settings of the run, and the report has the manager's pools."""

from pathlib import Path
from typing import Any

import pytest

from schemas.records import Record
from tentalis.agents import manager
from tentalis.agents.manager.core import task_id_of
from tentalis.agents.manager.curriculum import PROMPT, Pool, SolveRateRule
from tentalis.cli.main import app
from tentalis.learning.pools import curriculum_arguments, pools_in_words, pools_of
from tests.support.loop_records import RUN, outcome, task


def answered(number: int, prompt: int, rewards: list[float]) -> list[Record]:
    """The task of this number, which asks a prompt, and its outcomes."""
    of = task(task_id_of(RUN, number), n=len(rewards), metadata={PROMPT: str(prompt)})
    return [of, *(outcome(of, index, reward=reward) for index, reward in enumerate(rewards))]


def test_the_pools_are_those_that_the_manager_has_in_whatever_order_records_come() -> None:
    records = [*answered(0, 3, [0.0, 1.0]), *answered(1, 0, [1.0, 1.0]), *answered(2, 1, [0.0, 0.0])]
    other = task("other", n=2, run_id="another run")
    for given in (records, records[::-1], [*records, *records, other, outcome(other, 0, reward=1.0)]):
        pools = pools_of(RUN, 5, SolveRateRule(), given)
        assert pools_in_words(pools) == "2 unseen, 1 learnable, 1 easy, 1 hard"
    assert pools_of(RUN, 5, SolveRateRule(lowest=-1.0), records)[Pool.EQUAL] == 1, "a reward of 0 is half of solved"


def test_the_manager_gets_the_settings_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tentalis.cli.serve import manager as command

    given: dict[str, Any] = {}
    monkeypatch.setattr(command, "settings_of_role", lambda role, bootstrap: None)
    monkeypatch.setattr(manager, "run", lambda settings, **named: given.update(named) or 0)
    rule = SolveRateRule(low=0.2, high=0.7, probe=0.3, revisit=0.1, lowest=-1.0)
    words = ["manager", "--run", "r", "--prompts", str(tmp_path), *curriculum_arguments(rule)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert given["curriculum"] == rule and curriculum_arguments(None) == ()
