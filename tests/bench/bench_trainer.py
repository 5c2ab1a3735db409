"""Tokens per second of the whole optimizer step compared with TRL's GRPOTrainer on the same rollouts, in one run.

Two workloads, one after the other (BENCH_WORKLOAD, `groups,single`): mixed-length groups as in the assistant demo
(BENCH_GROUPS, 4, of 8 rollouts, prompt 40 to 60 tokens, response 8 to 64), and BENCH_CONVERSATIONS (64) of one answer
each and of 200 to 2,000 tokens; TRL wants multiples of 8.
LoRA r16 on all linear layers of the small real model (BENCH_MODEL), BENCH_DTYPE (float32), as many threads as cores.
BENCH_ROUNDS (3, after BENCH_WARM_UP, 1) times, these are timed in turn, ours and bare twice per round:

- ours: the step with its data path (fetch from a broker, verify, pack, loss, optimizer),
- bare: forward and backward of the same packed micro-batches only,
- TRL: its step in a separate environment, from padded tensors in memory, BENCH_TRL_BATCH (8) sequences per forward
  pass.

Tokens are those of the rollouts and counted alike: without padding, with a shared prompt as often as it is used. `mfu`
compares the operations that our step's packed positions need with the fastest matrix product measured in this run.
`overhead` is the time of our steps beyond the bare passes of the same round (median of the rounds), and
`data_path_and_optimizer` the share of the last step outside the forward and backward passes.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schemas import topics
from schemas.records import BatchPlan, Rollout
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.bench.lab import environment_with, log, own_kafka, peak_mib, report
from tests.bench.trainer_rollouts import grouped, single
from tests.bench.trl_job import PACKAGES, job_of
from tests.support.trainer_lab import config

MICRO_BATCH_TOKENS = 1024


def rollouts_of(workload: str, vocabulary: int) -> list[Rollout]:
    """The rollouts of a workload. Raises KeyError if there is none of that name."""
    make = {
        "groups": lambda: grouped(vocabulary, int(os.environ.get("BENCH_GROUPS", "4")), (40, 60), (8, 64)),
        "single": lambda: single(vocabulary, int(os.environ.get("BENCH_CONVERSATIONS", "64")), (200, 2000)),
    }
    return make[workload]()


def lay(settings: Settings, made: list[Rollout]) -> None:
    """Publishes the rollouts."""
    publisher = Publisher(settings, "bench", make_codec(settings))
    for each in made:
        publisher.send(topics.ROLLOUTS, each)
    publisher.flush()


def plan_for(settings: Settings) -> BatchPlan:
    """A plan of all rollouts on the topic, for one rank."""
    from trainer.data.candidates import offer_of
    from trainer.data.plan import BatchDraft, PlanContext, plan_of

    codec = make_codec(settings)
    offers = []
    for stored in read_to_end(settings, topics.ROLLOUTS):
        record = stored.decode(codec)
        assert isinstance(record, Rollout)
        offers.append(offer_of(record, stored.partition, stored.offset, 0, 4096))
    head = PlanContext("bench", "bench", "manifest", 1, MICRO_BATCH_TOKENS, 0, "bench")
    return plan_of(BatchDraft(tuple(offers), (), {0: len(offers)}, ()), head, 1, 1, 0)


@dataclass
class Ours:
    """The trainer's engine, with a plan whose rollouts are on a broker."""

    settings: Settings
    of: Any
    engine: Any
    plan: BatchPlan
    world: Any

    @classmethod
    def start(cls, settings: Settings, model: Path, plan: BatchPlan, dtype: str) -> "Ours":
        from trainer.distributed import ranks, runtime
        from trainer.step.engine import TrainingEngine

        of = config(
            model,
            policy="bench",
            run_id="bench",
            batch_rollouts=len(plan.rows),
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            threads=os.cpu_count(),
            base_dtype=dtype,
            lora={"rank": 16, "alpha": 32},
            optimizer={"lr": 3e-4},
        )
        runtime.configure_torch(runtime.threads_of(of), "cpu")
        joined = ranks.join_ranks()
        engine = TrainingEngine(of, model, joined, "cpu")
        return cls(settings, of, engine, plan, joined)

    def step(self) -> tuple[float, dict[str, float]]:
        """Runs one step, with reading the topic; returns its seconds and those of its phases."""
        from trainer.data.fetch import RolloutCache, fetch
        from trainer.distributed.stop import StopRequest
        from trainer.step.step import train_step

        began = time.perf_counter()
        rollouts = fetch(self.settings, make_codec(self.settings), self.plan.rows, RolloutCache())
        fetched = time.perf_counter() - began
        outcome = train_step(self.engine, self.plan, 0, rollouts, self.of.loss, self.world, StopRequest())
        return time.perf_counter() - began, outcome.seconds | {"fetch": fetched}

    def packs(self) -> list[Any]:
        """The micro-batches of a step, as passed to the model."""
        seen: list[Any] = []
        forward = self.engine.forward
        self.engine.forward = lambda batch, *more, **options: (seen.append(batch), forward(batch, *more, **options))[1]
        self.step()
        self.engine.forward = forward
        return seen

    def bare(self, packs: list[Any]) -> float:
        """Seconds for forward and backward of packed micro-batches."""
        began = time.perf_counter()
        for each in packs:
            self.engine.backward(self.engine.forward(each).logprobs.sum())
        seconds = time.perf_counter() - began
        self.engine.policy.zero_grad()
        return seconds

    def commit(self) -> tuple[float, float]:
        """Seconds for a checkpoint, and for publishing its adapter's files."""
        from tentalis.storage.places import adapters_location
        from trainer.model.policy import adapter_sha256
        from trainer.run.checkpoint import CheckpointState, save_checkpoint
        from trainer.run.publish import publish_adapter

        began = time.perf_counter()
        adapter = self.engine.policy.weights_bytes()
        state = CheckpointState(
            run_id="bench",
            policy="bench",
            step=1,
            attempt=1,
            plan_id="p",
            owner="bench",
            manifest_digest="m",
            low_water={},
            adapter_sha256=adapter_sha256(adapter),
            optimizer_steps=1,
            metrics={},
            seconds={},
        )
        root = self.settings.home / "checkpoints"
        parts = self.engine.policy.files(), self.engine.optimizer_state()
        checkpoint = save_checkpoint(root, state, adapter, *parts)
        saved = time.perf_counter()
        publish_adapter(adapters_location(self.settings, "bench"), 1, checkpoint)
        return saved - began, time.perf_counter() - saved


@contextmanager
def trl(model: Path, made: list[Rollout], dtype: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs TRL's trainer on the same rollouts; each line on its stdin triggers a step."""
    python = environment_with("bench-trl", PACKAGES)
    size = int(os.environ.get("BENCH_TRL_BATCH", "8"))
    job = job_of(model, made, batch_size=size, threads=os.cpu_count() or 1, dtype=dtype, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [python, str(Path(__file__).with_name("trainer_trl.py")), str(path)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def ask(child: "subprocess.Popen[str]") -> dict[str, float]:
    """Runs one step of TRL and returns its figures."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("step\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise RuntimeError("TRL's process ended; its error is above")
    found: dict[str, float] = json.loads(answer)
    return found


def measure(workload: str, model: Path, rounds: int, warm_up: int, dtype: str) -> dict[str, float]:
    """Returns the figures of a workload."""
    from transformers import AutoConfig

    made = rollouts_of(workload, AutoConfig.from_pretrained(model).vocab_size)
    tokens = sum(each.n_tokens for each in made)
    with own_kafka() as settings, trl(model, made, dtype) as peer:
        import torch

        from trainer.model.flops import measure_peak_flops, packed_flops

        lay(settings, made)
        ours = Ours.start(settings, model, plan_for(settings), dtype)
        packs = ours.packs()
        shape = ours.engine.policy.shape()
        flops = sum(packed_flops(each.spans, len(each.targets), shape) for each in packs)
        positions = sum(len(each.input_ids) for each in packs)
        log(f"{workload}: {len(made)} rollouts, {tokens} tokens, {positions} positions in {len(packs)} micro-batches")
        seconds: dict[str, list[float]] = {"ours": [], "bare": [], "trl": []}
        for _ in range(warm_up + rounds):
            # Ours and bare run twice: the first step after TRL has cold caches.
            peak_mib(reset=True)
            (whole, phases), memory = ours.step(), peak_mib()
            passes = [ours.bare(packs), ours.bare(packs)]
            again, theirs = ours.step()[0], ask(peer)
            log(f"ours {whole:.2f}, {again:.2f} s {phases}, bare {passes} s, TRL {theirs}")
            seconds["ours"] += [whole, again]
            seconds["bare"] += passes
            seconds["trl"].append(theirs["seconds"])
        checkpoint, publish = ours.commit()
        peak = measure_peak_flops(getattr(torch, dtype), "cpu", 2048, 12)
    counted = {name: np.array(values).reshape(warm_up + rounds, -1)[warm_up:] for name, values in seconds.items()}
    median = {name: float(np.median(values)) for name, values in counted.items()}
    return {
        "ours": tokens / median["ours"],
        "trl": tokens / median["trl"],
        "ratio": median["trl"] / median["ours"],
        "overhead": float(np.median(counted["ours"].sum(1) / counted["bare"].sum(1))) - 1.0,
        "data_path_and_optimizer": sum(phases[name] for name in ("fetch", "pack", "optimizer")) / whole,
        "mfu": flops / median["ours"] / peak,
        "peak_mib": memory,
        "trl_peak_mib": theirs["peak_mib"],
        "matmul_peak_gflops": peak / 1e9,
        "rollouts": len(made),
        "tokens": tokens,
        "positions": positions,
        "trl_positions": int(theirs["positions"]),
        "step_seconds": median["ours"],
        "bare_seconds": median["bare"],
        "trl_seconds": median["trl"],
        "checkpoint_seconds": checkpoint,
        "publish_seconds": publish,
    }


def main() -> None:
    from tentalis.inference.models import resolve_model

    rounds, dtype = int(os.environ.get("BENCH_ROUNDS", "3")), os.environ.get("BENCH_DTYPE", "float32")
    warm_up = int(os.environ.get("BENCH_WARM_UP", "1"))
    model = resolve_model(os.environ.get("BENCH_MODEL"), Settings.from_env().cache)
    workloads = os.environ.get("BENCH_WORKLOAD", "groups,single").split(",")
    figures: dict[str, Any] = {workload: measure(workload, model, rounds, warm_up, dtype) for workload in workloads}
    report(**figures, rounds=rounds, warm_up=warm_up, dtype=dtype, threads=os.cpu_count())


if __name__ == "__main__":
    main()
