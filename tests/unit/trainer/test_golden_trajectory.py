"""Fifty steps whose numbers are written down, with the environment they were made in.

In the same environment every adapter must have the recorded sha256. In another one sums round differently: there the
losses and norms of each step are compared within TOLERANCE. Write it anew, when a change of the numbers is meant, with
`python -m tests.unit.trainer.test_golden_trajectory`.
"""

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from tests.support.trainer_lab import config, rollouts, tiny_model
from trainer.data.candidates import offer_of
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.distributed import ranks, runtime
from trainer.distributed.environment import processor
from trainer.distributed.stop import StopRequest
from trainer.model.policy import adapter_sha256
from trainer.step.engine import TrainingEngine
from trainer.step.step import train_step

GOLDEN = ROOT / "tests" / "golden" / "trajectory.json"
STEPS = 50
TOLERANCE = 1e-4
"""Relative, and as much absolutely. Measured: another instruction set (no AVX) changes 8e-7, a second thread 2e-7."""
NAMES = ("rl_loss", "opd_loss", "grad_norm", "mismatch_kl", "entropy")


def environment() -> dict[str, Any]:
    """Returns all that floating-point sums depend on."""
    packages = ("torch", "transformers", "peft", "deepspeed", "numpy")
    return runtime.package_versions(packages) | {
        "instruction_set": runtime.instruction_set("cpu"),
        "machine": platform.machine(),
        "processor": processor(),
        "onednn": bool(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
        "threads": 1,
    }


def trajectory(folder: Path) -> list[dict[str, Any]]:
    """Metrics and adapter of each step: hybrid loss, two groups of four a step, micro-batches, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = tiny_model(folder)
        run_config = config(model, optimizer={"lr": 1e-3}, loss={"dual_clip": None})
        engine, rank_group = TrainingEngine(run_config, model, ranks.join_ranks(), "cpu"), ranks.join_ranks()
        steps = []
        for step in range(1, STEPS + 1):
            made = rollouts(2, 4, seed=step, prefix=f"s{step}-")
            offers = tuple(offer_of(r, 0, i, 0, 128) for i, r in enumerate(made))
            context = PlanContext("run", "tiny", "m", 1, 40, 0, "owner")
            plan = plan_of(BatchDraft(offers, (), {0: 8}, ()), context, step, 1, 0)
            output = train_step(
                engine, plan, step - 1, {r.key: r for r in made}, run_config.loss, rank_group, StopRequest()
            )
            steps.append(
                {name: output.metrics[name] for name in NAMES}
                | {"sha256": adapter_sha256(engine.policy.weights_bytes())}
            )
        return steps
    finally:
        torch.set_num_threads(threads)


def test_fifty_steps_are_those_that_were_written_down(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = trajectory(tmp_path / "model")
    here = environment()
    recorded = golden["environment"]
    different = {name: (value, here.get(name)) for name, value in recorded.items() if here.get(name) != value}
    assert len(found) == len(golden["steps"]) == STEPS
    for number, (ours, theirs) in enumerate(zip(found, golden["steps"], strict=True), 1):
        for name in NAMES:
            wanted = pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE)
            assert ours[name] == wanted, f"step {number}: {name}; the environment differs in {different or 'nothing'}"
    if different:
        pytest.skip(f"within {TOLERANCE}; not compared to the byte, for the environment differs: {different}")
    assert [step["sha256"] for step in found] == [step["sha256"] for step in golden["steps"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        text = json.dumps({"environment": environment(), "steps": trajectory(Path(scratch) / "model")}, indent=1)
    GOLDEN.write_text(text + "\n")
