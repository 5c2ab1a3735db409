"""Identities of the whole objective: finite differences, no dependence on order and split, a gradient at ratio one,
finite values at any ratio. Each loss alone is in test_losses.py and test_losses_topk.py; the vectors of clipping and of
advantages are there and in test_advantages.py."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.tensors import float32_bytes, float32_view, int32_view, uint8_view
from tests.support.trainer_lab import examples, rollouts
from tests.unit.trainer.test_objective import EVERY, gradient, policy, with_more
from trainer.config.loss import LossConfig
from trainer.data.example import TokenTargets
from trainer.data.pack import pack_examples
from trainer.model.logprobs import TokenScores
from trainer.model.model import LoraPolicy
from trainer.step.objective import LossCounts, objective

__all__ = ["policy"]  # the fixture

# What POLICY_LOSSES do not hold, each alone: distillation on the student's tokens, the penalties, and pairs.
PARTS: dict[str, dict[str, Any]] = {
    "distillation": {"opd_weight": 0.7},
    "k1": {"kl": {"coef": 0.3, "kind": "k1"}},
    "k2": {"kl": {"coef": 0.3, "kind": "k2"}},
    "k3": {"kl": {"coef": 0.3, "kind": "k3"}},
    "entropy": {"entropy_coef": 0.2},
    "pair": {"pair": {"weight": 0.7, "threshold": 0.5}},
    "infonce": {"pair": {"weight": 0.7, "threshold": 0.5, "kind": "infonce_pair"}},
}


def doubled(signal: TokenTargets) -> TokenTargets:
    """The same in float64, where a difference of two losses has digits left."""
    values = {f.name: getattr(signal, f.name) for f in fields(signal)}
    return replace(signal, **{name: v.double() for name, v in values.items() if v.is_floating_point()})


def numeric(of: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences, one value at a time."""
    units = step * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(of(at + unit) - of(at - unit)) / (2 * step) for unit in units])


@pytest.mark.parametrize("settings", PARTS.values(), ids=PARTS)
def test_every_other_part_by_finite_differences(policy: LoraPolicy, settings: dict[str, Any]) -> None:
    loss = LossConfig.model_validate({"rl_weight": 0.0, "opd_weight": 0.0} | settings)
    made = examples(with_more(rollouts(2, 4), policy), loss)
    batch = pack_examples(made)
    counts, signal = LossCounts.of([made], loss), doubled(batch.token_targets)
    with torch.no_grad():
        scores = policy(batch)
    logprobs = scores.logprobs.double().requires_grad_()
    entropies = scores.entropies.double().requires_grad_()

    def total(logprobs: Tensor, entropies: Tensor) -> Tensor:
        return objective(TokenScores(logprobs, entropies), signal, loss, counts)[0]

    ours = torch.autograd.grad(total(logprobs, entropies), (logprobs, entropies), allow_unused=True)
    found = [torch.zeros_like(logprobs) if each is None else each for each in ours]
    fixed = logprobs.detach(), entropies.detach()
    torch.testing.assert_close(found[0], numeric(lambda x: total(x, fixed[1]), fixed[0]), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(found[1], numeric(lambda x: total(fixed[0], x), fixed[1]), atol=1e-7, rtol=1e-5)
    assert float(found[1 if loss.entropy_coef else 0].abs().max()) > 0


def test_prompt_tokens_never_reach_the_loss(policy: LoraPolicy) -> None:
    """Their gradient is zero because they are no terms of it: neither as targets nor in any signal."""
    made = rollouts(3, 4)
    batch = pack_examples(examples(made))
    own = [
        token
        for each in made
        for token, chosen in zip(int32_view(each.token_ids), uint8_view(each.loss_mask), strict=True)
        if chosen
    ]
    assert sorted(batch.targets.tolist()) == sorted(own) and len(own) < sum(each.n_tokens for each in made)
    for field in fields(batch.token_targets):
        assert len(getattr(batch.token_targets, field.name)) <= len(own)
    assert len(policy(batch).logprobs) == len(own)


WITH_ADVANTAGES = {name: each for name, each in EVERY.items() if not {"kl", "pair", "opd_kind"} & set(each)}


@pytest.mark.parametrize("settings", WITH_ADVANTAGES.values(), ids=WITH_ADVANTAGES)
def test_a_group_of_unequal_rewards_moves_the_adapter_at_ratio_one(
    policy: LoraPolicy, settings: dict[str, Any]
) -> None:
    """From the rollouts to the weights, by every loss and advantage. The ancestors' group loss had no gradient here."""
    loss = LossConfig.model_validate(settings | {"opd_weight": 0.0, "entropy_coef": 0.0})
    on_policy = []
    for each in with_more(rollouts(1, 4), policy):
        values = float32_view(each.sampler_logprobs).copy()
        (example,) = examples([each])
        with torch.no_grad():
            values[example.trained_indices] = policy(pack_examples([example])).logprobs
        on_policy.append(each.model_copy(update={"sampler_logprobs": float32_bytes(values)}))
    _, moved = gradient(policy, [examples(on_policy, loss)], loss)
    assert all(float(each.abs().max()) > 1e-6 for each in moved)


@pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)
def test_log_ratios_without_bound_leave_loss_and_gradient_finite(policy: LoraPolicy, settings: dict[str, Any]) -> None:
    loss = LossConfig.model_validate(settings)
    far = []
    for number, each in enumerate(with_more(rollouts(2, 4), policy)):
        values = float32_view(each.sampler_logprobs).copy()
        values[uint8_view(each.loss_mask) == 1] = (-1e30, -300.0, -1e-30, -0.0)[number % 4]
        far.append(each.model_copy(update={"sampler_logprobs": float32_bytes(values)}))
    value, moved = gradient(policy, [examples(far, loss)], loss)
    assert value == value and abs(value) != float("inf")
    assert all(bool(each.isfinite().all()) for each in moved)
