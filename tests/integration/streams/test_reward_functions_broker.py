"""Reward functions in the running application: every result gets a Score, whatever the function does."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Score, Source, Terms, Verifier
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tests.support import ROOT
from tests.support.apps_lab import Apps
from tests.support.stream_records import make_result, make_task

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

MOODS = ("fine", "raises", "hangs", "crashes", "slow", "exits")


@pytest.fixture
def apps(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Apps]:
    with Apps(Settings(bootstrap=own_broker.bootstrap), tmp_path) as apps:
        yield apps


def test_every_result_gets_a_score_under_a_name_with_the_digest_of_the_source(apps: Apps, tmp_path: Path) -> None:
    source = (ROOT / "tests" / "support" / "bad_rewards.py").read_text(encoding="utf-8")
    (tmp_path / "rewards.py").write_text(source, encoding="utf-8")
    (tmp_path / "scorers.yaml").write_text(
        'environments: {chat: {reward: {kind: function, target: "rewards.py:moody", time_limit_s: 5}}}\n',
        encoding="utf-8",
    )
    verifier = Verifier(name="reward", data=json.dumps({"columns": {"answer": "4"}}))
    tasks = {mood: make_task(mood, terms=Terms(rl=Source.RESULT), verifier=verifier, n_samples=1) for mood in MOODS}
    apps.start("scoring", "--scorers", str(tmp_path / "scorers.yaml"))
    apps.put(topics.RESULTS, *(make_result(task, text=mood) for mood, task in tasks.items()))

    def scores() -> dict[str, Score]:
        return {score.key: score for score in apps.read(topics.HALVES, Score)}

    apps.wait(lambda: len(scores()) == len(MOODS))
    apps.end("scoring")
    found, log = scores(), apps.log_of("scoring")
    assert {mood: score.reward for mood, score in found.items()} == {
        mood: 0.5 if mood in ("fine", "slow") else None for mood in MOODS
    }
    assert {mood for mood, score in found.items() if score.components.get("timed_out") == 1.0} == {"hangs"}
    assert f"{tmp_path}/rewards.py:55: the call took longer than 5 s" in log
    assert f'{tmp_path}/rewards.py", line ' in log and "ValueError: a bad" in log
    assert {score.scorer.partition("/")[0] for score in found.values()} == {"rewards.py:moody"}
