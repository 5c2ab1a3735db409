"""A run that distils over likeliest tokens, from hints that carry none, says so: it would train nothing in silence."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.trainer_lab import rollout
from trainer.config.loss import LossConfig
from trainer.data.candidates import WITHOUT_TOPK, lacks_topk, offer_of
from trainer.run.coordinator import Coordinator
from trainer.run.metrics import TrainerMetrics

TOPK = LossConfig(opd_kind="topk")


def test_a_hint_without_likeliest_tokens_is_seen_and_its_rollout_dropped_for_that_reason() -> None:
    hinted, both = rollout(teacher=[-1, -2, -3], reward=None), rollout(teacher=[-1, -2, -3])
    assert lacks_topk(hinted, TOPK) and lacks_topk(both, TOPK) and not lacks_topk(rollout(), TOPK)
    assert not lacks_topk(hinted, LossConfig())
    assert offer_of(hinted, 0, 0, 0, 99, TOPK).unfit == WITHOUT_TOPK
    offer = offer_of(both, 0, 0, 0, 99, TOPK)
    assert (offer.unfit, offer.rl, offer.opd) == (None, True, False)
    assert offer_of(hinted, 0, 0, 0, 99).unfit is None


def test_it_is_said_once_per_run_and_counted_from_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TrainerMetrics()
    coordinator = cast(
        Coordinator, SimpleNamespace(planner=SimpleNamespace(pending=0), metrics=metrics, _topk_warned=False)
    )
    report: dict[str, Any] = {"segments": [], "lag": {}, "dead": 0}
    with caplog.at_level(logging.WARNING):
        Coordinator.add_reports(
            coordinator, [report | {"rank": 0, "without_topk": 0}, report | {"rank": 1, "without_topk": 0}]
        )
        assert not caplog.records
        for count in (2, 5, 5):
            Coordinator.add_reports(
                coordinator, [report | {"rank": 0, "without_topk": count}, report | {"rank": 1, "without_topk": 1}]
            )
    (warning,) = caplog.records
    assert "OPD part trains nothing" in warning.message and "--teacher-top" in warning.message
    counter_value = metrics.exporter.registry.get_sample_value
    assert counter_value("tentalis_trainer_without_topk_total") == 6
    # A rollback begins another run in the same process: its readers are new ones, and count from 0.
    Coordinator.add_reports(coordinator, [report | {"rank": 0, "without_topk": 5, "dead": 3}])
    metrics.set_recovered("tiny", 0, 4)
    for count in (0, 2):
        Coordinator.add_reports(coordinator, [report | {"rank": 0, "without_topk": count, "dead": count}])
    assert counter_value("tentalis_trainer_without_topk_total") == 8
    assert counter_value("tentalis_trainer_dead_letters_total") == 5
