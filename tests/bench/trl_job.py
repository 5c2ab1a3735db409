"""What trainer_trl.py, which runs in TRL's environment, is given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.records import Rollout
from schemas.tensors import float32_view, int32_view

# TRL imports requests without declaring it.
PACKAGES = ("trl==1.13.0", "torch==2.15.0", "transformers==5.17.0", "peft==0.21.2", "requests")


def job_of(
    model: Path, made: Sequence[Rollout], *, batch_size: int, threads: int, dtype: str, device: str
) -> dict[str, Any]:
    """The job of training on these rollouts, with the adapter's shape of the trainer's benchmarks."""
    rollouts = []
    for each in made:
        split = each.loss_mask.index(1)
        tokens = int32_view(each.token_ids).tolist()
        assert each.reward is not None and each.group_mean is not None
        rollouts.append(
            {
                "prompt": tokens[:split],
                "response": tokens[split:],
                "sampler": float32_view(each.sampler_logprobs)[split:].tolist(),
                # Alone, an answer's advantage is its reward.
                "advantage": each.reward - each.group_mean if each.n_requested > 1 else each.reward,
            }
        )
    shape = {"rank": 16, "alpha": 32}
    return shape | {
        "model": str(model),
        "rollouts": rollouts,
        "batch_size": batch_size,
        "threads": threads,
        "dtype": dtype,
        "device": device,
    }
