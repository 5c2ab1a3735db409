"""The order of a step on a rank: what it may wait for, and when."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer_lab import config
from tests.unit.loop_records import plan
from trainer import loop
from trainer.metrics import TrainerMetrics
from trainer.stop import Stop, Stopped


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
        raise Stopped

    monkeypatch.setattr(loop, "fetch", fetch)
    monkeypatch.setattr(loop, "train_step", begin)
    monkeypatch.setattr(loop, "Publisher", lambda *_: None)
    monkeypatch.setattr(loop, "Intake", lambda *_, **__: SimpleNamespace(poll=lambda _: []))
    checkpoint = SimpleNamespace(adapter=lambda: b"", optimizer=lambda: None)
    monkeypatch.setattr(loop, "Checkpoint", SimpleNamespace(read=lambda _: checkpoint))
    channel: Any = SimpleNamespace(
        wait_command=lambda _: {"checkpoint": "c", "first_version": 0, "low_water": {}},
        next_command=lambda: {"plan": plan(1, ["t/0"]).model_dump_json()},
        gather=lambda tag, _: happened.append(tag),
    )
    nothing: Any = SimpleNamespace(rank=1, load=lambda *_: None, policy=SimpleNamespace(vocab_size=64))
    with pytest.raises(Stopped):
        loop._train(config(tmp_path), nothing, Stop(), nothing, TrainerMetrics(), nothing, nothing, channel, lead=None)
    assert happened == ["fetch", "ready/1/1", "collectives"]
