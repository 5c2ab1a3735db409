"""A rank's reading on a real broker: it can be held for as long as a decision takes, and misses nothing. Bad records
stop it, are dead-lettered once, and can be skipped."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Rollout
from tentalis.cli.main import app
from tentalis.dlq.actions import raw_of
from tentalis.dlq.records import DeadLetter, letter_of
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.service.exit_codes import ExitCode
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.trainer_lab import VOCAB, rollout, rollouts, tiny_model
from trainer.config.loss import LossConfig
from trainer.data.candidates import NOTHING_BEFORE
from trainer.data.fetch import RolloutCache
from trainer.data.plan import BatchPlanner
from trainer.data.rollout_reader import RolloutReader

pytestmark = pytest.mark.broker


def test_while_it_is_held_nothing_is_read_and_afterwards_all_of_it(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    lab = Lab(kafka, unique, tmp_path, tmp_path)
    planner = BatchPlanner(8, 1000, {}, dict(lab.start))
    reader = RolloutReader(
        lab.settings,
        lab.codec,
        lab.publisher,
        RolloutCache(),
        policy=lab.policy,
        rank=0,
        vocab_size=VOCAB,
        max_tokens=128,
        loss=LossConfig(),
        low_water=lab.start,
    )

    def pending() -> int:
        for segment in reader.poll(0.1):
            planner.add_segment(segment)  # which raises LostOffers for a gap
        return planner.pending

    def still(seconds: float) -> bool:
        before, until = pending(), time.monotonic() + seconds
        while time.monotonic() < until:
            if pending() != before:
                return False
        return True

    try:
        # Held before it has any partition: those that it gets later are held too.
        reader.pause_reading(True)
        lab.put_groups(2)
        eventually(lambda: pending() == 0 and reader.lag(), 60)
        assert still(2.0) and planner.pending == 0
        reader.pause_reading(False)
        eventually(lambda: pending() == 8, 30, message=lambda: str(planner.pending))
        reader.pause_reading(True)
        lab.put_groups(3)
        assert still(2.0) and planner.pending == 8
        reader.pause_reading(False)
        eventually(lambda: pending() == 8 + 12, 30, message=lambda: str(planner.pending))
        assert all(behind == 0 for behind in reader.lag().values())
    finally:
        reader.close()


GARBAGE = 1000
BETWEEN = 80
LIMIT = 100  # bad records in a row


def letters_of(lab: Lab) -> list[DeadLetter]:
    """The letters of records after the start of the lab."""
    found = (letter_of(raw_of(m)) for m in messages_to_end(lab.settings, topics.dlq(topics.ROLLOUTS)))
    return [
        each for each in found if each.origin is not None and each.origin.offset >= lab.start[each.origin.partition]
    ]


def skip(lab: Lab, *options: str) -> tuple[int, dict[str, Any], str]:
    group = f"tentalis-trainer-{lab.policy}"
    arguments = ["groups", "skip", group, *options, "-o", "json", "--bootstrap-server", str(lab.settings.bootstrap)]
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, json.loads(done.stdout or "{}"), done.stderr


def test_a_thousand_bad_records_stop_the_trainer_until_an_operator_skips_them(
    kafka: Kafka, unique: str, tmp_path: Path
) -> None:
    """On one partition, between good ones at first: a first read is within the limits, a second one is not."""
    lab = Lab(kafka, unique, tmp_path, tiny_model(tmp_path))
    batch: list[Rollout] = rollouts(2, policy=lab.policy, prefix=f"{lab.policy}-")
    n_bad = 0
    for record, count in zip(batch, [*[BETWEEN] * 6, GARBAGE, 0], strict=True):
        lab.publisher.send(topics.ROLLOUTS, record, partition=3)
        for _ in range(count):
            lab.publisher.send_bytes(topics.ROLLOUTS, b"bad", b"garbage", [("own", b"1")], partition=3)
        n_bad += count
    lab.publisher.flush()
    run_config = lab.config(steps=1)
    assert lab.train(run_config) == ExitCode.NEEDS_OPERATOR
    assert f"run `tentalis groups skip tentalis-trainer-{lab.policy} --until-good`" in lab.log_text(run_config)
    assert 0 < len(letters_of(lab)) <= 6 * BETWEEN + LIMIT
    assert lab.train(run_config) == ExitCode.NEEDS_OPERATOR
    first = letters_of(lab)
    assert Counter(each.id for each in first).most_common(1)[0][1] == 1, "a restart writes no letter again"
    assert len(first) <= 6 * BETWEEN + LIMIT, "and does not empty the topic"

    code, report, _ = skip(lab, "--until-good")
    (planned,) = report["skips"]
    assert (code, report["done"], planned["records"], planned["partition"]) == (0, False, n_bad, 3)
    assert letters_of(lab) == first, "a dry run changes nothing"
    _, report, _ = skip(lab, "--to", "1000000000", "--partition", "3")
    (beyond,) = report["skips"]
    assert beyond["until"] == end_offsets(lab.settings, topics.ROLLOUTS)[3], "later records are not skipped unseen"
    code, report, _ = skip(lab, "--until-good", "--yes", "--reason", "a producer without a schema")
    assert (code, report["done"]) == (0, True)
    letters = letters_of(lab)
    skipped = [each for each in letters if each.stage == "skip"]
    assert len(skipped) == len({each.id for each in skipped}) == n_bad
    assert skipped[0].error.startswith("a producer without a schema: ") and skipped[0].error_class == "OperatorSkip"
    assert {each.size for each in skipped} == {len(b"garbage")}
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    assert len(letters_of(lab)) == len(letters)
    assert lab.run_log(run_config).last_step == 1
    assert skip(lab, "--until-good")[1]["skips"] == []


def test_tokens_of_a_client_that_the_model_cannot_compute_are_dropped_and_do_not_stop_the_trainer(
    kafka: Kafka, unique: str, tmp_path: Path
) -> None:
    """As a client posts them to the bridge: token ids of another tokenizer, and no prompt."""
    lab = Lab(kafka, unique, tmp_path, tiny_model(tmp_path))
    changes: tuple[dict[str, Any], ...] = ({"response": [VOCAB]}, {"prompt": ()})
    for change in changes:
        for index in range(LIMIT + 1):
            record = rollout(f"{lab.policy}-{next(iter(change))}-{index}", policy=lab.policy, **change)
            lab.publisher.send(topics.ROLLOUTS, record, partition=3)
    lab.publisher.flush()
    time.sleep(0.01)  # a later append time: all of them come before the batch is full
    lab.put_groups(2)
    run_config = lab.config(steps=1)
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    (plan,) = lab.run_log(run_config).plans.values()
    counts = Counter({drop.reason: drop.count for drop in plan.drops})
    outside = f"token ids outside the model's vocabulary of {VOCAB}"
    assert counts == {outside: LIMIT + 1, NOTHING_BEFORE: LIMIT + 1}
    assert letters_of(lab) == []
