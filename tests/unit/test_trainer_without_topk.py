"""A run that distils over likeliest tokens, from hints that carry none, says so: it would train nothing in silence."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.trainer_lab import rollout
from trainer.lead import Lead
from trainer.losses.settings import Loss
from trainer.metrics import TrainerMetrics
from trainer.offers import WITHOUT_TOPK, offer_of, without_topk

TOPK = Loss(opd_kind="topk")


def test_a_hint_without_likeliest_tokens_is_seen_and_its_rollout_dropped_for_that_reason() -> None:
    hinted, both = rollout(teacher=[-1, -2, -3], reward=None), rollout(teacher=[-1, -2, -3])
    assert without_topk(hinted, TOPK) and without_topk(both, TOPK) and not without_topk(rollout(), TOPK)
    assert not without_topk(hinted, Loss())
    assert offer_of(hinted, 0, 0, 0, 99, TOPK).unfit == WITHOUT_TOPK
    offer = offer_of(both, 0, 0, 0, 99, TOPK)
    assert (offer.unfit, offer.rl, offer.opd) == (None, True, False)
    assert offer_of(hinted, 0, 0, 0, 99).unfit is None


def test_it_is_said_once_per_run_and_counted_from_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TrainerMetrics()
    lead = cast(Lead, SimpleNamespace(planner=SimpleNamespace(pending=0), metrics=metrics, _told=False))
    report: dict[str, Any] = {"segments": [], "lag": {}, "dead": 0}
    with caplog.at_level(logging.WARNING):
        Lead.take(lead, [report | {"rank": 0, "without_topk": 0}, report | {"rank": 1, "without_topk": 0}])
        assert not caplog.records
        for count in (2, 5, 5):
            Lead.take(lead, [report | {"rank": 0, "without_topk": count}, report | {"rank": 1, "without_topk": 1}])
    (said,) = caplog.records
    assert "OPD part trains nothing" in said.message and "--teacher-top" in said.message
    counted = metrics.exporter.registry.get_sample_value
    assert counted("tentalis_trainer_without_topk_total") == 6
    # A rollback begins another run in the same process: its readers are new ones, and count from 0.
    Lead.take(lead, [report | {"rank": 0, "without_topk": 5, "dead": 3}])
    metrics.recovered("tiny", 0, 4)
    for count in (0, 2):
        Lead.take(lead, [report | {"rank": 0, "without_topk": count, "dead": count}])
    assert counted("tentalis_trainer_without_topk_total") == 8
    assert counted("tentalis_trainer_dead_letters_total") == 5
