"""The order of a step on a rank: what it may wait for, and when."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore

from tentalis.local.ports import free_port
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.support.loop_records import plan
from tests.support.trainer_lab import config
from trainer.distributed import ranks
from trainer.distributed.members import Members, Membership, enter
from trainer.distributed.rank_place import RankPlace
from trainer.distributed.stop import StopRequest, StopRequested
from trainer.distributed.store import serve_store
from trainer.run import loop, rank_loop
from trainer.run.metrics import TrainerMetrics
from trainer.run.rank_loop import RankLoop


def train_one_step(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    rank_group: Any,
    channel: Any,
    coordinator: Any = None,
    *,
    poll: Any = lambda _: [],
    fetch: Any = lambda *_: {},
    at_step: Any = lambda: None,
) -> None:
    """Runs the loop of a rank without Kafka and a model, until its first step."""

    def train_step(*_: Any) -> None:
        at_step()
        raise StopRequested

    monkeypatch.setattr(rank_loop, "fetch", fetch)
    monkeypatch.setattr(rank_loop, "train_step", train_step)
    monkeypatch.setattr(rank_loop, "Publisher", lambda *_: None)
    monkeypatch.setattr(rank_loop, "TopicWatch", lambda *_: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(rank_loop, "RolloutReader", lambda *_, **__: SimpleNamespace(poll=poll))
    nothing: Any = SimpleNamespace(policy=SimpleNamespace(vocab_size=64), restore=lambda *_: None)
    parts = config(folder), nothing, StopRequest(), rank_group, TrainerMetrics(), nothing, nothing, channel, coordinator
    with pytest.raises(StopRequested):
        RankLoop.begin(*parts).train()


def test_a_rank_reads_kafka_before_the_ranks_meet_and_collectives_begin_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A quiet topic or a slow broker would otherwise run into a collective's timeout."""
    happened: list[str] = []

    def fetch(*_: Any) -> dict[str, Any]:
        happened.append("fetch")
        return {}

    def receive(_: Any) -> tuple[bytes, None]:
        happened.append("broadcast")
        return b"", None

    channel: Any = SimpleNamespace(
        wait_for_command=lambda *_: {"first_version": 0, "low_water": {}},
        next_command=lambda: {"plan": plan(1, ["t/0"]).model_dump_json()},
        barrier=lambda tag, *_: happened.append(tag),
    )
    second: Any = SimpleNamespace(rank=1, size=2, broadcast=receive)
    train_one_step(monkeypatch, tmp_path, second, channel, fetch=fetch, at_step=lambda: happened.append("collectives"))
    assert happened == ["checkpoint", "broadcast", "fetch", "ready/1/1", "collectives"]


def test_a_rank_waits_for_records_only_while_it_has_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wait of a tenth of a second before each command would be idle time in every step."""
    waits: list[float] = []
    commands: list[dict[str, Any]] = []
    plans = iter([None, None, plan(1, ["t/0"])])
    channel: Any = SimpleNamespace(
        wait_for_command=lambda *_: commands.pop(0),
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
    alone: Any = SimpleNamespace(rank=0, size=1)
    train_one_step(monkeypatch, tmp_path, alone, channel, coordinator, poll=lambda wait: waits.append(wait) or [])
    assert waits == [rank_loop.POLL_SECONDS] * 3 + [0.0], "two idle turns, one that plans, one that trains"


def test_a_rank_that_is_done_and_is_started_again_ends_with_0_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    store = PrefixStore("start 0", serve_store(port, "store", "MASTER_PORT", timedelta(seconds=30)))
    entry = PrefixStore("members", store)
    for rank in range(3):
        enter(entry, "rank", rank)
    first, done = (Members(Membership("rank", rank, 3, "rank 0", "here"), entry) for rank in (0, 1))
    done.finish()
    monkeypatch.setattr(ranks, "_rank_group", None)
    monkeypatch.setattr(ranks, "rank_place", lambda: RankPlace(1, 3, "127.0.0.1", port))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert loop.run(config(tmp_path), Settings(bootstrap="127.0.0.1:1"), StopRequest()) == ExitCode.OK
    assert first._look_around() == ""
