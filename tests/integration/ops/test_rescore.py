"""`tentalis rescore` on a real broker: scores are written beside the old ones, once."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Score, Verifier
from tentalis.cli.main import app
from tentalis.kafka.admin import ensure
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import records_to_end
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import Verdict
from tentalis.service.settings import Settings
from tests.support import loop_records
from tests.support.kafka_fixture import Kafka

pytestmark = [pytest.mark.broker, pytest.mark.long]


def test_scores_are_written_beside_the_old_ones_and_once(kafka: Kafka, unique: str) -> None:
    settings = Settings(bootstrap=kafka.bootstrap)
    ensure(settings)
    codec = make_codec(settings)
    publisher = Publisher(settings, "test", codec)
    verifier = Verifier(name="gsm8k", data='{"answer": "42"}')
    task = loop_records.task(unique, environment="math", run_id=unique, verifier=verifier)
    results = [loop_records.result(task, index, text=text) for index, text in enumerate((r"\boxed{42}", r"\boxed{41}"))]
    for each in results:
        publisher.send(topics.RESULTS, each)
        publisher.send(topics.HALVES, score_of_result(each, Verdict(0.0), "old/1", each.event_time))
    publisher.flush()

    def command(*more: str) -> dict[str, Any]:
        arguments = ["rescore", unique, "--verifier", "math/math", "--bootstrap-server", kafka.bootstrap, "-o", "json"]
        ran = CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
        return dict(json.loads(ran.stdout))

    def written() -> list[tuple[str, float | None]]:
        halves = (each for each in records_to_end(settings, (topics.HALVES,), codec) if isinstance(each, Score))
        return sorted((each.scorer, each.reward) for each in halves if each.sample.head.run_id == unique)

    before = written()
    assert [(each["old"], each["new"]) for each in command("--dry-run")["answers"]] == [(0.0, 1.0), (0.0, 0.0)]
    assert written() == before
    found = command("--yes")
    assert (found["scored"], found["changed"], found["already"]) == (2, 1, 0)
    assert written() == sorted([*before, (found["scorer"], 0.0), (found["scorer"], 1.0)])
    found = command("--yes")
    assert (found["scored"], found["already"]) == (0, 2) and len(written()) == 4
