"""The devices on which a rank and a replay compute."""

import os
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tentalis.service.settings import Settings
from tests.support import loop_records
from tests.support.trainer_lab import config, tiny_model
from trainer.distributed import ranks, runtime
from trainer.distributed.runtime import NoDevice, configure_torch, gpu_of, threads_of
from trainer.replay import job as replay_job
from trainer.replay.job import ReplayJob, ReplayJobResult, run_job
from trainer.replay.recording import CannotReplay
from trainer.replay.replay import check_device

NOTHING: Any = None
SECOND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29400"}


def job(folder: Path, device: str) -> ReplayJob:
    """Of no plan: the initial adapter alone."""
    return ReplayJob(
        manifest=loop_records.manifest().model_copy(update={"device": device}),
        config=config(folder / "model", device="auto"),
        model_folder=folder / "model",
        plans=(),
        start=0,
        checkpoint=None,
        into=folder / "into",
        world_size=1,
    )


def test_each_rank_of_a_machine_has_a_gpu_of_its_own() -> None:
    assert [gpu_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(NoDevice, match="torch finds 2 on this machine: none for rank 2"):
        gpu_of(2, 2)
    with pytest.raises(NoDevice, match="torch finds 0"):
        gpu_of(0, 0)


def test_cuda_is_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(runtime, "_configured_device", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    configure_torch(1, "cuda")
    assert chosen == [3]


@pytest.mark.parametrize(
    ("number", "here", "gpu", "threads"),
    [
        ({}, {}, 0, 8),
        (SECOND, {}, 0, 8),
        (SECOND, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, 4),
    ],
    ids=["alone", "on a machine of its own", "beside the first"],
)
def test_a_rank_shares_gpus_and_cores_with_the_ranks_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: dict[str, str],
    here: dict[str, str],
    gpu: int,
    threads: int,
) -> None:
    for name in (*SECOND, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, (number | here).get(name, ""))
    chosen: list[int] = []
    monkeypatch.setattr(ranks, "_rank_group", None)
    monkeypatch.setattr(ranks, "_open_store", lambda _: HashStore())
    monkeypatch.setattr(ranks, "_watch_peers", lambda *_: None)
    monkeypatch.setattr(ranks.RankGroup, "meet", lambda *_: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(runtime, "_configured_device", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpu + 1)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ranks.join_ranks("cuda")
    configure_torch(1, "cuda")
    assert (chosen, os.environ["LOCAL_RANK"]) == ([gpu], str(gpu))
    assert threads_of(config(tmp_path, threads=None)) == threads


def test_a_replay_computes_where_the_manifest_says_whatever_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model(tmp_path / "model")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = run_job(job(tmp_path, "cpu"), Settings(home=tmp_path), NOTHING)
    assert list(done.sha256) == [0]


@pytest.mark.parametrize("why", ["another device", "a live rank"])
def test_a_replay_has_processes_of_its_own_where_this_one_cannot_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """DeepSpeed keeps to the device that it began with; in a rank's environment this process would join its ranks."""

    def spawn(arguments: list[str], ranks: int, *_: Any, **__: Any) -> int:
        result = ReplayJobResult(sha256={0: "trained elsewhere"}, metrics={}, checkpoint=tmp_path)
        Path(arguments[-1]).with_suffix(".done.json").write_text(result.model_dump_json())
        return 0

    monkeypatch.setattr(runtime, "_configured_device", "cpu" if why == "another device" else None)
    if why == "a live rank":
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29400"}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("trainer.run.launch.spawn", spawn)
    monkeypatch.setattr(replay_job, "_train_rank", lambda *_: pytest.fail("trained in this process"))
    device = "cuda" if why == "another device" else "cpu"
    assert run_job(job(tmp_path, device), Settings(home=tmp_path), NOTHING).sha256 == {0: "trained elsewhere"}


def test_a_replay_without_the_recorded_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_device("run-1", "cpu", 8)
    check_device("run-1", "cuda", 1)
    with pytest.raises(CannotReplay, match=r"trained on GPUs, 2 of them, and torch finds 1 .*--verify-only"):
        check_device("run-1", "cuda", 2)
