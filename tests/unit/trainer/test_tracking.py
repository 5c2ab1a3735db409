"""Trackers: the real libraries, and whatever fails in them."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Source, Terms
from tests.support.kafka_fixture import eventually
from tests.support.trainer_lab import config, rollout
from trainer.config.trainer_config import TrackingConfig
from trainer.data import batch_stats
from trainer.run import tracking
from trainer.run.metrics import TrainerMetrics
from trainer.run.tracking import MetricTrackers, QueuedTracker

METRICS = {"rl_loss": 0.5, "reward_mean": 0.25, "tokens": 300.0}
SECONDS = {"pack": 0.5, "forward_backward": 1.0}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = MetricTrackers(TrackingConfig(to=("tensorboard",)), "run", {}, tmp_path)
    trackers.step(1, METRICS, SECONDS)
    trackers.step(2, METRICS | {"rl_loss": 0.25}, SECONDS)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tracking" / "run" / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/rl_loss")] == [(1, 0.5), (2, 0.25)]
    assert events.Scalars("train/tokens_per_second")[0].value == 200.0
    assert events.Scalars("seconds/pack")[0].value == 0.5


def test_weights_and_biases_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.tracking.CLOSE_SECONDS", 120.0)  # it starts a process; the machine may be busy
    trackers = MetricTrackers(TrackingConfig(to=("wandb",)), "run-of-a-test", {"lr": 0.1}, tmp_path)
    trackers.step(1, METRICS, SECONDS)
    trackers.close()
    assert "tracking with" not in caplog.text, caplog.text
    (path,) = (tmp_path / "tracking").rglob("*.wandb")

    def written() -> bool:  # another process writes the file
        found = {item.key or "/".join(item.nested_key): item.value_json for item in history_of(path.read_bytes())}
        assert (found.get("train/rl_loss"), found.get("_step")) == ("0.5", "1"), found
        return True

    eventually(written, 60, 0.5)


def history_of(data: bytes) -> list[Any]:
    """The history items of a W&B file that is smaller than one block: after a header of 7 bytes, records of a checksum
    (4 bytes), a length (2) and a kind (1)."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, at = [], 7
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        found += list(record.history.item)
        at += 7 + length
    return found


def test_a_branch_has_curves_of_its_own(tmp_path: Path) -> None:
    given = config(Path("model"), tracking={"to": ["tensorboard"], "folder": str(tmp_path / "given")})
    metrics = TrainerMetrics()
    for run_config in (given, given.model_copy(update={"run_id": "run.1"})):
        metrics.use_trackers(trackers := MetricTrackers.for_run(run_config, "run", tmp_path), 1.0)
        trackers.step(1, METRICS, SECONDS)
    metrics.close()
    found = sorted(path.parent.relative_to(tmp_path) for path in tmp_path.rglob("events.*"))
    assert found == [Path("given/run.1/tensorboard"), Path("given/tensorboard")]


class Failing:
    """A sink that works for one step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > 1:
            raise ConnectionError("the service is gone")

    def close(self) -> None:
        raise AssertionError("closed although it failed")


def test_a_failing_tracker_is_logged_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    tracker = QueuedTracker("failing", Failing)
    for step in range(1, 6):
        tracker.step(step, METRICS)
    tracker.close()
    tracker.step(7, METRICS)
    assert [record.message for record in caplog.records] == [
        "tracking with failing stopped, training continues: ConnectionError: the service is gone"
    ]


def test_a_library_that_is_not_there_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Failing:
        raise ModuleNotFoundError("No module named 'wandb'")

    tracker = QueuedTracker("wandb", missing)
    tracker.close()
    assert "No module named 'wandb'" in caplog.text and caplog.records[0].levelno == logging.ERROR


def test_a_hanging_tracker_does_not_delay_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.1)
    forever = threading.Event()

    class Hanging(Failing):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            forever.wait()

    tracker = QueuedTracker("hanging", Hanging)
    for step in range(tracking.QUEUE_STEPS + 5):
        tracker.step(step, METRICS)
    tracker.close()
    assert [record.message for record in caplog.records] == [
        f"tracking with hanging stopped, training continues: its queue of {tracking.QUEUE_STEPS} steps is full"
    ]
    forever.set()


def test_what_a_steps_rollouts_were() -> None:
    asked = {"terms": Terms(opd=Source.USER)}
    both = rollout("a", teacher=[-1.0, -1.0, -1.0], version=5)
    refused = rollout("b", version=2)
    refused = refused.model_copy(update={"head": refused.head.model_copy(update=asked)})
    only = rollout("c", reward=None, teacher=[-1.0, -1.0, -1.0], version=4)
    counts = batch_stats.count_rollouts([both, refused, only], version=5)
    assert {name for name, count in counts.items() if count} == {
        *("staleness_0", "staleness_1", "staleness_3_4"),
        *("joined_rl", "joined_opd", "joined_both", "hints_asked", "hints_accepted"),
    }
    assert batch_stats.metrics(counts)["hint_acceptance"] == pytest.approx(2 / 3)
    assert sum(count for name, count in counts.items() if name.startswith("staleness")) == 3
    assert batch_stats.metrics(batch_stats.count_rollouts([], 0))["hint_acceptance"] == 0.0
