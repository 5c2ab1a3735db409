"""Advantages and losses against hand-computed values and finite differences."""

import math

import pytest
import torch
from torch import Tensor

from trainer.advantage import advantage
from trainer.loss import clipped_surrogate, distillation_advantages

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "log_ratio_clamp": 10.0}


def surrogate(ratio: float, value: float) -> float:
    loss, _ = clipped_surrogate(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([value]), **BOUNDS)
    return float(loss)


@pytest.mark.parametrize(
    ("ratio", "value", "expected"),
    [(1.5, 1.0, -1.28), (0.5, -1.0, 0.8), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (1.0, 0.7, -0.7)],
)
def test_checklist_23_clip_vectors(ratio: float, value: float, expected: float) -> None:
    assert surrogate(ratio, value) == pytest.approx(expected, abs=1e-6)


def test_checklist_23_group_advantages() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    plain = [advantage(r, 4, 4, 0.5, 0.5) for r in rewards]
    divided = [advantage(r, 4, 4, 0.5, 0.5, "group_mean_std") for r in rewards]
    assert plain == [0.5, -0.5, -0.5, 0.5]
    assert divided == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=3e-4)
    assert [advantage(1.0, 3, 3, 1.0, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_conversation_has_its_reward_and_a_lone_survivor_of_a_group_has_nothing() -> None:
    assert advantage(-0.3, 1, 1, -0.3, 0.0) == -0.3
    assert advantage(-0.3, 8, 1, -0.3, 0.0) is None
    assert advantage(1.0, 8, 2, 0.5, 0.5) == 0.5


def test_the_distillation_advantage_is_the_clipped_difference_to_the_teacher() -> None:
    value = distillation_advantages(torch.tensor([-1.0, -5.0, -2.0]), torch.tensor([-1.5, -2.0, -4.0]), 1.0)
    assert value.tolist() == [0.5, -1.0, 1.0]


def draw(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sampler = -3.0 * torch.rand(n, generator=generator, dtype=torch.float64)
    logprobs = sampler + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return logprobs, sampler, torch.randn(n, generator=generator, dtype=torch.float64)


def test_checklist_24_finite_differences() -> None:
    logprobs, sampler, advantages = draw()

    def loss(x: Tensor) -> Tensor:
        return clipped_surrogate(x, sampler, advantages, **BOUNDS)[0]

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


def test_checklist_25_a_permutation_and_a_split_leave_the_sum() -> None:
    logprobs, sampler, advantages = draw()
    whole, metrics = clipped_surrogate(logprobs, sampler, advantages, **BOUNDS)
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(1))
    parts = [clipped_surrogate(logprobs[i], sampler[i], advantages[i], **BOUNDS) for i in (order[:13], order[13:])]
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    for name, value in metrics.items():
        torch.testing.assert_close(value, parts[0][1][name] + parts[1][1][name])


def test_checklist_26_unequal_rewards_have_a_gradient_at_ratio_one() -> None:
    logprobs = torch.full((4,), -2.0, requires_grad=True)
    advantages = torch.tensor([0.5, -0.5, -0.5, 0.5])
    loss, metrics = clipped_surrogate(logprobs, logprobs.detach(), advantages, **BOUNDS)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert float(metrics["mismatch_kl"]) == 0.0
    assert float(metrics["ratio"]) == 4.0


def test_checklist_27_the_clamp_keeps_infinities_out() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    loss, metrics = clipped_surrogate(logprobs, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, 1.0]), **BOUNDS)
    loss.backward()
    assert math.isfinite(float(loss))
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_the_estimate_of_the_mismatch_is_k3() -> None:
    _, metrics = clipped_surrogate(torch.tensor([-2.0]), torch.tensor([-2.1]), torch.zeros(1), **BOUNDS)
    assert float(metrics["mismatch_kl"]) == pytest.approx(math.exp(0.1) - 0.1 - 1, abs=1e-6)
