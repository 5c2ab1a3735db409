"""The page on reward functions: its examples are run."""

import json
import re
from pathlib import Path

import pytest

from schemas.records import Verifier
from tentalis.rewards.functions.scorer import FunctionScorer, describe
from tentalis.rewards.scorer_file import load_scorers
from tests.support import ROOT
from tests.support.stream_records import make_result, make_task

PAGE = (ROOT / "docs" / "how-to" / "reward-functions.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page_score_answers(tmp_path: Path) -> None:
    for name, text in zip(("rewards.py", "scorers.yaml"), re.findall(r"```\w+\n(.*?)```", PAGE, re.S), strict=True):
        assert text.startswith(f"# {name}")
        (tmp_path / name).write_text(text, encoding="utf-8")
    scorers = {name: scorer for _, name, scorer in load_scorers(tmp_path / "scorers.yaml")}
    columns = {"solution": "18", "data_source": "gsm8k", "ground_truth": "18", "info": {"most": 100}}
    task = make_task(verifier=Verifier(name="reward", data=json.dumps({"columns": columns})))
    found = {}
    for name, scorer in scorers.items():
        assert isinstance(scorer, FunctionScorer)
        scorer.check(task)
        found[name] = scorer.verify(task, make_result(task, text="9 and 9 are 18"))
        scorer.close()
    assert found["reward"].reward == 1.0 and found["reward"].components == {"short": 1.0}
    assert found["mixed"].reward == pytest.approx(2.0 * (1.0 - 0.2 * 0.14 + 0.2) / 1.2 - 1.0)
    assert found["mixed"].components == pytest.approx({"accuracy": 1.0, "brevity": -0.14, "raw": 0.972})
    names = ["accuracy", "compute_score", "brevity", "tidy"]
    functions = describe([f"rewards.py:{name}" for name in names], base=tmp_path).functions
    assert [(each.convention, each.messages) for each in functions] == [
        ("trl", False),
        ("verl", False),
        ("verifiers", True),
        ("tentalis", False),
    ]
