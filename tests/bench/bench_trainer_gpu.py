"""Tokens per second of the optimizer step on one GPU, for a model with the shape of Qwen3-4B and random weights.

Two workloads: `groups`, eight groups of eight answers (prompts of 256 to 768 tokens, answers of 256 to 1,024), and
`single`, 64 conversations of 200 to 2,000 tokens. LoRA r16 on all linear layers, bfloat16 base, micro-batches of
BENCH_MICRO_BATCH (16,384) tokens, no gradient checkpointing, deterministic kernels. BENCH_ROUNDS (3, after one to warm
up) times:

- ours: packing, losses, forward, backward, clipping and AdamW (reading the topic is not in it: `make bench B=trainer`
  has it),
- bare: forward and backward of the same packed micro-batches only.

Then TRL's GRPOTrainer on the same rollouts, padded, in a separate process: BENCH_TRL_BATCH (8, 4, 2: the first that
fits) sequences per forward pass, bfloat16 by autocast, torch's attention, no gradient checkpointing, no Liger kernels.
BENCH_TRL_PYTHON names an environment that has TRL.

Tokens are those of the rollouts, without padding, with a shared prompt as often as it is used. `mfu` compares the
operations that the packed positions need (flops.py) with the fastest matrix product measured in this run.
`replay_equal`: two processes that each did two steps from the same seed have the same adapter, byte by byte.

BENCH_LAYERS, BENCH_WIDTH and BENCH_DEVICE make a small model of it, to try the benchmark itself.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.records import BatchPlan, Rollout
from tests.bench.lab import environment_with, log, report
from tests.bench.trainer_rollouts import grouped, single
from tests.bench.trl_job import PACKAGES, job_of

DEVICE = os.environ.get("BENCH_DEVICE", "cuda")
LAYERS, WIDTH = int(os.environ.get("BENCH_LAYERS", "36")), int(os.environ.get("BENCH_WIDTH", "2560"))
MICRO_BATCH = int(os.environ.get("BENCH_MICRO_BATCH", "16384"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
VOCABULARY = 151_936 if WIDTH == 2560 else 4096
WORKLOADS = {
    "groups": lambda: grouped(VOCABULARY, 8, (256, 768), (256, 1024)),
    "single": lambda: single(VOCABULARY, 64, (200, 2000)),
}


def make_model(folder: Path) -> None:
    """Saves a model with the shape of Qwen3-4B and random weights in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 19 // 5,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def plan_for(rollouts: Sequence[Rollout], step: int) -> BatchPlan:
    """A plan of all rollouts, for one rank."""
    from trainer.data.candidates import offer_of
    from trainer.data.plan import BatchDraft, PlanContext, plan_of

    offers = tuple(offer_of(each, 0, offset, 0, 4096) for offset, each in enumerate(rollouts))
    head = PlanContext("bench", "bench", "manifest", 1, MICRO_BATCH, 0, "bench")
    return plan_of(BatchDraft(offers, (), {0: len(offers)}, ()), head, step, 1, 0)


class Ours:
    """The trainer's engine on the device."""

    def __init__(self, model: Path) -> None:
        from tests.support.trainer_lab import config
        from trainer.distributed import ranks, runtime
        from trainer.step.engine import TrainingEngine

        self.of = config(
            model,
            policy="bench",
            run_id="bench",
            batch_rollouts=64,
            micro_batch_tokens=MICRO_BATCH,
            threads=os.cpu_count(),
            base_dtype="bfloat16",
            lora={"rank": 16, "alpha": 32},
            optimizer={"lr": 3e-4},
        )
        runtime.configure_torch(runtime.threads_of(self.of), DEVICE)
        self.world = ranks.join_ranks(DEVICE)
        self.engine = TrainingEngine(self.of, model, self.world, DEVICE)

    def step(self, plan: BatchPlan, rollouts: Mapping[str, Rollout]) -> tuple[float, dict[str, float]]:
        """Runs one step; returns its seconds and those of its phases."""
        from trainer.distributed.stop import StopRequest
        from trainer.step.step import train_step

        began = time.perf_counter()
        outcome = train_step(self.engine, plan, 0, rollouts, self.of.loss, self.world, StopRequest())
        synchronise()
        return time.perf_counter() - began, outcome.seconds

    def packs(self, plan: BatchPlan, rollouts: Mapping[str, Rollout]) -> list[Any]:
        """The micro-batches of a step, as passed to the model."""
        from trainer.step.step import build_examples, pack_micro_batches

        examples = build_examples(list(plan.rows), rollouts, self.of.loss, self.world)[1]
        return [batch.to(DEVICE) for batch in pack_micro_batches(examples, self.of.loss)]

    def bare(self, packs: Sequence[Any]) -> float:
        """Seconds for forward and backward of packed micro-batches."""
        began = time.perf_counter()
        for each in packs:
            self.engine.backward(self.engine.forward(each).logprobs.sum())
        synchronise()
        seconds = time.perf_counter() - began
        self.engine.policy.zero_grad()
        return seconds


def synchronise() -> None:
    """Waits for the device."""
    import torch

    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Most memory that was allocated on the GPU since the last call."""
    import torch

    if DEVICE != "cuda":
        return 0.0
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return most


def measure_ours(model: Path) -> dict[str, Any]:
    """Figures of ours and bare by workload."""
    import torch

    from trainer.model.flops import measure_peak_flops, packed_flops

    ours = Ours(model)
    peak = measure_peak_flops(torch.bfloat16, DEVICE, 8192 if DEVICE == "cuda" else 512, 12)
    shape = ours.engine.policy.shape()
    found: dict[str, Any] = {"peak_tflops": peak / 1e12}
    for name, make in WORKLOADS.items():
        made = make()
        rollouts, plan = {each.key: each for each in made}, plan_for(made, 1)
        packs = ours.packs(plan, rollouts)
        flops = sum(packed_flops(each.spans, len(each.targets), shape) for each in packs)
        peak_gib()
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        for _ in range(ROUNDS + 1):
            whole, phases = ours.step(plan, rollouts)
            seconds["ours"].append(whole)
            seconds["bare"].append(ours.bare(packs))
            log(f"{name}: ours {whole:.3f} s {phases}, bare {seconds['bare'][-1]:.3f} s")
        median = {which: statistics.median(values[1:]) for which, values in seconds.items()}
        tokens, positions = sum(each.n_tokens for each in made), sum(len(each.input_ids) for each in packs)
        found[name] = {
            "tokens": tokens,
            "positions": positions,
            "micro_batches": len(packs),
            "ours_tokens_s": tokens / median["ours"],
            "ours_positions_s": positions / median["ours"],
            "bare_tokens_s": tokens / median["bare"],
            "mfu": flops / median["ours"] / peak,
            "bare_mfu": flops / median["bare"] / peak,
            "peak_gib": peak_gib(),
        }
        log(json.dumps(found[name]))
    return found


def adapter_after_two_steps(model: Path) -> str:
    """sha256 of the adapter after two steps from the seed."""
    from trainer.model.policy import adapter_sha256

    ours = Ours(model)
    ours.engine.load_initial_weights()
    made = WORKLOADS["groups"]()
    for step in (1, 2):
        ours.step(plan_for(made, step), {each.key: each for each in made})
    return adapter_sha256(ours.engine.policy.weights_bytes())


def in_child(what: str, model: Path) -> dict[str, Any]:
    """What a process that only does this reports: its memory on the GPU is free again afterwards."""
    command = [sys.executable, "-m", "tests.bench.bench_trainer_gpu", what, str(model)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def measure_trl(model: Path, name: str) -> dict[str, float]:
    """Figures of TRL for a workload."""
    python = os.environ.get("BENCH_TRL_PYTHON") or environment_with("bench-trl", PACKAGES)
    made = WORKLOADS[name]()
    sizes = [int(os.environ["BENCH_TRL_BATCH"])] if "BENCH_TRL_BATCH" in os.environ else [8, 4, 2]
    for size in sizes:
        job = job_of(model, made, batch_size=size, threads=os.cpu_count() or 1, dtype="bfloat16", device=DEVICE)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(job, file)
            file.flush()
            script = str(Path(__file__).with_name("trainer_trl.py"))
            done = subprocess.run(
                [python, script, file.name], input="step\n" * (ROUNDS + 1), stdout=subprocess.PIPE, text=True
            )
        figures = [json.loads(line) for line in done.stdout.splitlines()]
        log(f"{name}: TRL with {size} sequences: {figures or 'failed'}")
        if len(figures) == ROUNDS + 1:
            seconds = statistics.median(each["seconds"] for each in figures[1:])
            tokens = sum(each.n_tokens for each in made)
            return {"trl_tokens_s": tokens / seconds, "trl_peak_gib": figures[-1]["peak_gib"], "trl_batch": size}
    raise RuntimeError(f"TRL did not do its steps on {name}; its errors are above")


def main() -> None:
    """Measures ours, the replay and TRL, each in a child process."""
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise SystemExit("trainer_gpu needs a CUDA GPU, and torch finds none here")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        model = Path(folder) / "model"
        in_child("model", model)
        found = in_child("ours", model)
        log(json.dumps(found))
        digests = [in_child("replay", model)["adapter_sha256"] for _ in range(2)]
        log(f"adapters after two steps: {digests}")
        found["replay_equal"] = digests[0] == digests[1]
        for name in WORKLOADS:
            found[name] |= measure_trl(model, name)
            found[name]["ratio"] = found[name]["ours_tokens_s"] / found[name]["trl_tokens_s"]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    report(**found, device=device, torch=torch.__version__, layers=LAYERS, width=WIDTH, rounds=ROUNDS)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["model", folder]:
            make_model(Path(folder))
            report()
        case ["ours", folder]:
            report(**measure_ours(Path(folder)))
        case ["replay", folder]:
            report(adapter_sha256=adapter_after_two_steps(Path(folder)))
