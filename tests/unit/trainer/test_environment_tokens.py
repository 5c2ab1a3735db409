"""Tokens of an environment inside a response: in the context, in no part of the loss, and without a gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.records import Rollout
from schemas.tensors import float32_bytes, float32_view
from tests.support.trainer_lab import examples, rollout, tiny_model
from trainer.advantages.rewarded_sample import answer_length
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import LoraShape
from trainer.data.pack import pack_examples
from trainer.model.model import LoraPolicy
from trainer.step.objective import LossCounts, objective

MASKED = 6
"""Index of a token of the environment between two turns of the policy."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoraPolicy:
    folder: Path = tiny_model(tmp_path_factory.mktemp("model"))
    return LoraPolicy(folder, "tiny-base", LoraShape(rank=4, alpha=8.0), 0, "cpu", torch.float32)


def group(**of_first: Any) -> list[Rollout]:
    """Two samples of one group; the first is an episode whose token MASKED came from the environment."""
    first, second = (
        rollout("t", i, prompt=(3, 4, 5), response=(10, 11, 12, 13, 14), reward=reward, rewards=(1.0, 0.0), n=2)
        for i, reward in enumerate((1.0, 0.0))
    )
    mask = bytearray(first.loss_mask)
    mask[MASKED] = 0
    return [first.model_copy(update={"loss_mask": bytes(mask), **of_first}), second]


def with_logprob(value: float) -> bytes:
    values = float32_view(group()[0].sampler_logprobs).copy()
    values[MASKED] = value
    return float32_bytes(values)


def gradient(policy: LoraPolicy, made: list[Rollout]) -> list[Tensor]:
    loss = LossConfig()
    batch = examples(made, loss)
    policy.zero_grad()
    packed = pack_examples(batch)
    total, _ = objective(policy(packed), packed.token_targets, loss, LossCounts.of([batch], loss), None)
    total.backward()
    return [p.grad.clone() for _, p in policy.trained_parameters() if p.grad is not None]


def test_two_rollouts_that_differ_in_a_masked_log_prob_alone_have_the_same_gradient(policy: LoraPolicy) -> None:
    plain = gradient(policy, group())
    other = gradient(policy, group(sampler_logprobs=with_logprob(-0.01)))
    assert any(float(each.abs().max()) > 0 for each in plain)
    assert all(torch.equal(left, right) for left, right in zip(plain, other, strict=True))


def test_the_same_change_on_a_token_of_the_policy_changes_the_gradient(policy: LoraPolicy) -> None:
    whole = b"\0\0\0" + b"\1" * 5
    plain = gradient(policy, group(loss_mask=whole))
    other = gradient(policy, group(loss_mask=whole, sampler_logprobs=with_logprob(-0.01)))
    assert not all(torch.equal(left, right) for left, right in zip(plain, other, strict=True))


def test_a_masked_token_is_not_counted_and_not_predicted() -> None:
    first, _ = group()
    assert answer_length(first) == 4
    (example,) = examples([first])
    assert example.trained_indices.tolist() == [3, 4, 5, 7]
    assert example.token_ids.tolist() == [3, 4, 5, 10, 11, 12, 13, 14], "it stays in the context"
