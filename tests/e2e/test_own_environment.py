"""The page docs/how-to/write-an-environment.md to its end: its environment is installed, trained on, and replayed."""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.lab import CLI, Home, pids_of
from tests.e2e.test_learn import started, values_of
from tests.support import ROOT
from tests.support.environment_pages import install_guess

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 2


# The ordinary suite has its parts: tests/unit/learning/test_environments.py plays and scores.
def test_the_environment_of_the_page_is_trained_on_and_replayed_equal(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    package = tmp_path / "package"
    package.mkdir()
    install_guess(package)
    home.env["PYTHONPATH"] = os.pathsep.join([str(package), str(ROOT)])
    source = tmp_path / "rounds.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Begin round {number}."}) + "\n" for number in range(20)))
    words = ["--environment", "guess", "--max-tokens", "64", "--curriculum", "--model", str(home.model)]
    words += ["--steps", str(STEPS), "--group", "4", "--set", "lora.rank=4"]
    # A tiny model earns equal rewards in some groups, and dynamic sampling would draw others for long.
    words += ["--set", "loss.dynamic_sampling=false", "-o", "json"]

    result = home.finish(started(home, [*CLI, "learn", str(source), *words]), timeout=400)
    assert result["policy"] == f"learn@v{STEPS}" and result["held_out"]["unknown"] == 0
    assert sum(result["pools"].values()) == 18 and result["pools"]["unseen"] < 18
    results = values_of(home, "tentalis.results.v1")
    assert {each["task"]["environment"] for each in results} == {"guess"}
    assert {each["ending"] for each in results} <= {"done", "turn_limit", "truncated"}
    assert max(len(each["turns"]) for each in results) > 1, "some episode has several turns"
    adapters = [each["adapter_sha256"] for each in values_of(home, "tentalis.batches.v1") if "adapter_sha256" in each]
    assert len({*adapters}) == STEPS + 1, "every step has changed the adapter"
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert [step["equal"] for step in json.loads(replayed.stdout)["steps"]] == [True] * (STEPS + 1)
    assert pids_of(home.path) == []
