"""The order of a step on a rank: what it may wait for, and when."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.loop_records import plan
from tests.support.trainer_lab import config
from trainer.distributed.stop import StopRequest, StopRequested
from trainer.run import loop
from trainer.run.metrics import TrainerMetrics


def test_a_rank_reads_kafka_before_the_ranks_meet_and_collectives_begin_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A quiet topic or a slow broker would otherwise run into a collective's timeout."""
    happened: list[str] = []

    def fetch(*_: Any) -> dict[str, Any]:
        happened.append("fetch")
        return {}

    def begin(*_: Any) -> None:
        happened.append("collectives")
        raise StopRequested

    def receive(_: Any) -> tuple[bytes, None]:
        happened.append("broadcast")
        return b"", None

    monkeypatch.setattr(loop, "fetch", fetch)
    monkeypatch.setattr(loop, "train_step", begin)
    monkeypatch.setattr(loop, "Publisher", lambda *_: None)
    monkeypatch.setattr(loop, "TopicWatch", lambda *_: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(loop, "RolloutReader", lambda *_, **__: SimpleNamespace(poll=lambda _: []))
    channel: Any = SimpleNamespace(
        wait_for_command=lambda _: {"first_version": 0, "low_water": {}},
        next_command=lambda: {"plan": plan(1, ["t/0"]).model_dump_json()},
        barrier=lambda tag, _: happened.append(tag),
    )
    nothing: Any = SimpleNamespace(policy=SimpleNamespace(vocab_size=64), restore=lambda *_: None)
    second: Any = SimpleNamespace(rank=1, size=2, broadcast=receive)
    with pytest.raises(StopRequested):
        loop._train_run(
            config(tmp_path),
            nothing,
            StopRequest(),
            second,
            TrainerMetrics(),
            nothing,
            nothing,
            channel,
            coordinator=None,
        )
    assert happened == ["checkpoint", "broadcast", "fetch", "ready/1/1", "collectives"]


def test_a_rank_waits_for_records_only_while_it_has_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wait of a tenth of a second before each command would be idle time in every step."""
    waits: list[float] = []
    commands: list[dict[str, Any]] = []
    plans = iter([None, None, plan(1, ["t/0"])])

    def begin(*_: Any) -> None:
        raise StopRequested

    reader = SimpleNamespace(poll=lambda wait: waits.append(wait) or [], pause_reading=lambda paused: None)
    monkeypatch.setattr(loop, "fetch", lambda *_: {})
    monkeypatch.setattr(loop, "train_step", begin)
    monkeypatch.setattr(loop, "Publisher", lambda *_: None)
    monkeypatch.setattr(loop, "TopicWatch", lambda *_: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(loop, "RolloutReader", lambda *_, **__: reader)
    monkeypatch.setattr(loop, "_share_checkpoint", lambda *_: None)
    channel: Any = SimpleNamespace(
        wait_for_command=lambda _: commands.pop(0),
        send_command=commands.append,
        next_command=lambda: commands.pop(0) if commands else None,
        receive_reports=list,
        barrier=lambda *_: None,
    )
    coordinator: Any = SimpleNamespace(
        state=SimpleNamespace(manifest=SimpleNamespace(first_version=0), checkpoint=None),
        planner=SimpleNamespace(low_water={}),
        add_reports=lambda _: None,
        take_commit=list,
        update_backpressure=lambda: None,
        rolled_back=False,
        end_reason=None,
        next_plan=lambda: next(plans),
        reading_paused=False,
        should_pause_reading=False,
    )
    nothing: Any = SimpleNamespace(policy=SimpleNamespace(vocab_size=64))
    alone: Any = SimpleNamespace(rank=0, size=1)
    with pytest.raises(StopRequested):
        loop._train_run(
            config(tmp_path), nothing, StopRequest(), alone, TrainerMetrics(), nothing, nothing, channel, coordinator
        )
    assert waits == [loop.POLL_SECONDS] * 3 + [0.0], "two idle turns, one that plans, one that trains"
