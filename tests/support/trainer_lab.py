"""A tiny policy, rollouts for it, and a trainer configuration."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.digest import with_digest
from schemas.records import (
    LogprobsMode,
    PolicySpan,
    RecordedBy,
    Rollout,
    Sampling,
    Source,
    TaskHead,
    Terms,
)
from schemas.tensors import float32_bytes, int32_bytes, uint8_bytes
from trainer.advantages.batch import estimate_advantages
from trainer.advantages.rewarded_sample import rewarded_sample
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import TrainerConfig
from trainer.data.example import TrainingExample, example_of

VOCAB = 64


def tiny_model(folder: Path, layers: int = 2) -> Path:
    """A random Llama of two layers with a vocabulary of 64, always with the same weights, saved to `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            # The default initialisation is so small that every distribution is uniform and every gradient nearly zero.
            for parameter in model.parameters():
                parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return folder


def rollout(
    task_id: str = "t0",
    index: int = 0,
    *,
    policy: str = "tiny",
    version: int = 0,
    prompt: Sequence[int] = (3, 4, 5, 6),
    response: Sequence[int] = (10, 11, 12),
    sampler: Sequence[float] | None = None,
    teacher: Sequence[float] | None = None,
    reward: float | None = 1.0,
    rewards: Sequence[float] | None = None,
    n: int = 1,
    temperature: float = 1.0,
    **more: Any,
) -> Rollout:
    """A rollout with its digest; `rewards` are the rewards of its whole group, for the group statistics."""
    group = list(rewards) if rewards is not None else [] if reward is None else [reward]
    n_prompt, n_all = len(prompt), len(prompt) + len(response)
    sampler = [-4.0] * len(response) if sampler is None else sampler
    fields: dict[str, Any] = {
        "rollout_id": f"{task_id}/{index}",
        "rollout_event_id": f"event-{task_id}-{index}",
        "event_time": 1,
        "head": TaskHead(
            task_id=task_id,
            policy=policy,
            environment="chat",
            n_samples=max(n, index + 1),
            terms=Terms(opd=None if teacher is None else Source.USER),
        ),
        "sample_index": index,
        "result_id": f"result-{task_id}-{index}",
        "token_ids": int32_bytes([*prompt, *response]),
        "loss_mask": uint8_bytes([0] * n_prompt + [1] * len(response)),
        "sampler_logprobs": float32_bytes([0.0] * n_prompt + list(sampler)),
        "logprobs_mode": LogprobsMode.PROCESSED,
        "sampling": Sampling(temperature=temperature),
        "policy_spans": (PolicySpan(start=n_prompt, policy=f"{policy}@v{version}"),),
        "reward": reward,
        "n_requested": n,
        "n_closed": len(group),
        "group_mean": float(np.mean(group)) if group else None,
        "group_std": float(np.std(group)) if group else None,
        "has_rl": reward is not None,
        "has_opd": teacher is not None,
        "teacher_logprobs": None if teacher is None else float32_bytes([0.0] * n_prompt + list(teacher)),
        "digest": "-",
        "recorded_by": RecordedBy.WORKER,
    }
    assert len(fields["token_ids"]) == 4 * n_all
    return with_digest(Rollout(**(fields | more)))


def rollouts(groups: int, samples: int = 4, *, seed: int = 0, policy: str = "tiny", prefix: str = "t") -> list[Rollout]:
    """Groups of random rollouts with rewards, every other one also with teacher log-probs."""
    draw = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = draw.integers(1, VOCAB, draw.integers(2, 9)).tolist()
        rewards = draw.random(samples).round(3).tolist()
        for i in range(samples):
            response = draw.integers(1, VOCAB, draw.integers(1, 12)).tolist()
            sampler = (-4.2 + 0.3 * draw.standard_normal(len(response))).tolist()
            teacher = (np.array(sampler) + draw.standard_normal(len(response))).tolist() if i % 2 else None
            made.append(
                rollout(
                    f"{prefix}{g}",
                    i,
                    policy=policy,
                    prompt=prompt,
                    response=response,
                    sampler=sampler,
                    teacher=teacher,
                    reward=rewards[i],
                    rewards=rewards,
                    n=samples,
                )
            )
    return made


def examples(batch: Sequence[Rollout], loss: LossConfig | None = None) -> list[TrainingExample]:
    """The examples of a batch, with the RL and OPD parts that each rollout has."""
    loss = LossConfig() if loss is None else loss
    advantages = estimate_advantages(
        [sample for r in batch if r.has_rl and (sample := rewarded_sample(r)) is not None], loss
    ).by_rollout
    return [example_of(r, advantages=advantages.get(r.rollout_id), opd=r.has_opd, loss=loss) for r in batch]


def config(model: Path, **more: Any) -> TrainerConfig:
    """A configuration for the tiny model: batches of 8, one thread, three steps."""
    values: dict[str, Any] = {
        "run_id": "run",
        "policy": "tiny",
        "base_model": str(model),
        "base_model_name": "tiny-base",
        "batch_rollouts": 8,
        "micro_batch_tokens": 64,
        "max_rollout_tokens": 128,
        "max_staleness": 1000,
        "steps": 3,
        "threads": 1,
        "device": "cpu",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"lr": 0.01},
    }
    return TrainerConfig.model_validate(values | more)
