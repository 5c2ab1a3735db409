"""A rank's reading on a real broker: it can be held for as long as a decision takes, and misses nothing."""

import time
from pathlib import Path

import pytest

from tests.integration.test_trainer_run import Lab
from tests.kafka_fixture import Kafka, eventually
from tests.trainer_lab import VOCAB
from trainer.fetch import Cache
from trainer.intake import Intake
from trainer.losses.settings import Loss
from trainer.plan import Planner

pytestmark = pytest.mark.broker


def test_while_it_is_held_nothing_is_read_and_afterwards_all_of_it(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    lab = Lab(kafka, unique, tmp_path, tmp_path)
    planner = Planner(8, 1000, {}, dict(lab.start))
    intake = Intake(
        lab.settings,
        lab.codec,
        lab.publisher,
        Cache(),
        policy=lab.policy,
        rank=0,
        vocab_size=VOCAB,
        max_tokens=128,
        loss=Loss(),
        low_water=lab.start,
    )

    def pending() -> int:
        for segment in intake.poll(0.1):
            planner.take(segment)  # which raises LostOffers for a gap
        return planner.pending

    def still(seconds: float) -> bool:
        before, until = pending(), time.monotonic() + seconds
        while time.monotonic() < until:
            if pending() != before:
                return False
        return True

    try:
        # Held before it has any partition: those that it gets later are held too.
        intake.hold(True)
        lab.lay(2)
        eventually(lambda: pending() == 0 and intake.lag(), 60)
        assert still(2.0) and planner.pending == 0
        intake.hold(False)
        eventually(lambda: pending() == 8, 30, message=lambda: str(planner.pending))
        intake.hold(True)
        lab.lay(3)
        assert still(2.0) and planner.pending == 8
        intake.hold(False)
        eventually(lambda: pending() == 8 + 12, 30, message=lambda: str(planner.pending))
        assert all(behind == 0 for behind in intake.lag().values())
    finally:
        intake.close()
