"""Every loss against hand-computed values, finite differences, and what none of them may depend on."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from trainer.config.loss import LossConfig, LossKind, PairLossConfig
from trainer.losses.clipped import clipped
from trainer.losses.distill import distillation_advantages
from trainer.losses.kl import kl
from trainer.losses.pair import contrastive
from trainer.losses.registry import POLICY_LOSSES
from trainer.losses.tokens import LossTokens, sequence_means
from trainer.losses.truncated_is import importance_weights


def tokens(
    logprobs: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    sequences: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTokens:
    if sequences is None:
        sequences = torch.zeros(len(logprobs), dtype=torch.int64)
    return LossTokens(
        logprobs,
        sampler,
        advantages,
        torch.ones_like(sampler) if weights is None else weights,
        sequences,
        int(sequences.max()) + 1,
    )


def one(kind: LossKind, ratio: float, advantage: float, logprob: float = -1.0, **settings: Any) -> tuple[float, float]:
    """Loss and gradient of a single token."""
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    sampler = x.detach() - math.log(ratio)
    value, _ = POLICY_LOSSES[kind](
        tokens(x, sampler, torch.tensor([advantage], dtype=torch.float64)), LossConfig(kind=kind, **settings)
    )
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), float(gradient)


def test_the_registry_has_every_name_of_the_configuration() -> None:
    assert tuple(POLICY_LOSSES) == get_args(LossKind)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1.0, -1.28), (0.5, -1.0, 0.8), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (1.0, 0.7, -0.7)],
)
@pytest.mark.parametrize("kind", ["clipped", "dapo"])
def test_clip_vectors(kind: LossKind, ratio: float, advantage: float, expected: float) -> None:
    assert one(kind, ratio, advantage)[0] == pytest.approx(expected, abs=1e-9)


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    assert one("clipped", 5.0, -1.0, dual_clip=None)[0] == pytest.approx(5.0)
    assert one("clipped", 5.0, -1.0)[0] == pytest.approx(3.0), "the default"
    assert one("clipped", 5.0, -1.0, dual_clip=3.0) == (pytest.approx(3.0), 0.0)
    assert one("clipped", 2.0, -1.0, dual_clip=3.0)[0] == pytest.approx(2.0)
    assert one("clipped", 0.5, -1.0, dual_clip=3.0)[0] == pytest.approx(0.8)
    assert one("clipped", 5.0, 1.0, dual_clip=3.0)[0] == pytest.approx(-1.28)


def test_cispo_weighs_and_never_drops() -> None:
    assert one("cispo", 10.0, 1.0, logprob=-2.0, cispo_high=4.0) == (pytest.approx(8.0), pytest.approx(-4.0))
    assert one("cispo", 0.5, -1.0, logprob=-2.0) == (pytest.approx(-1.0), pytest.approx(0.5))
    assert one("cispo", 0.1, -1.0, logprob=-2.0, cispo_low=0.5)[1] == pytest.approx(0.5)


def test_gspo_has_one_ratio_per_sequence() -> None:
    x = torch.tensor([0.001, -0.001, -1.0], dtype=torch.float64, requires_grad=True)
    sequences = torch.tensor([0, 0, 1])
    assert sequence_means(x.detach(), sequences, 2).tolist() == pytest.approx([0.0, 0.0, -1.0])
    sampler = torch.zeros(3, dtype=torch.float64)
    value, metrics = POLICY_LOSSES["gspo"](
        tokens(x, sampler, torch.ones(3, dtype=torch.float64), sequences, torch.tensor([0.5, 0.5, 0.0])),
        LossConfig(kind="gspo"),
    )
    assert float(value) == pytest.approx(-1.0)
    assert torch.autograd.grad(value, x)[0].tolist() == pytest.approx([-0.5, -0.5, 0.0])
    assert float(metrics["clipped"]) == 0.0


def test_gspo_clips_a_sequence_as_a_whole() -> None:
    x = torch.tensor([0.1, 0.0, -0.2, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    both = tokens(x, torch.zeros(4, dtype=torch.float64), advantages, torch.tensor([0, 0, 1, 1]))
    value, metrics = POLICY_LOSSES["gspo"](both, LossConfig(kind="gspo"))
    gradient = torch.autograd.grad(value, x)[0].tolist()
    assert gradient == pytest.approx([0.0, 0.0, -math.exp(-0.1), -math.exp(-0.1)])
    assert float(metrics["clipped"]) == 2.0


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "expected"),
    [(0.1, 0.4, 1.0, 0.0), (0.1, 0.2, 1.0, -2.0), (0.4, 0.1, 1.0, -0.25), (0.4, 0.1, -1.0, 0.0), (0.1, 0.4, -1.0, 4.0)],
)
def test_masked_leaves_out_what_moved_too_far(mu: float, pi: float, advantage: float, expected: float) -> None:
    value, gradient = one("masked", pi / mu, advantage, logprob=math.log(pi), mask_kl=0.0)
    assert (value, gradient) == (pytest.approx(expected), pytest.approx(expected))
    pull = 0.1 * math.log(pi / mu) ** 2
    assert one("masked", pi / mu, advantage, logprob=math.log(pi), mask_kl=0.1)[0] == pytest.approx(expected + pull)


def test_truncated_importance_sampling() -> None:
    assert one("truncated_is", math.e, 1.0) == (pytest.approx(-2.0), pytest.approx(-2.0))
    assert one("truncated_is", 0.5, -1.0) == (pytest.approx(0.5), pytest.approx(0.5))
    assert one("truncated_is", math.e, 1.0, importance={"mode": "mask"}) == (0.0, 0.0)
    assert one("truncated_is", 0.4, 1.0, importance={"mode": "mask", "low": 0.5})[1] == 0.0
    two = tokens(torch.tensor([0.5, 0.2, 0.1]), torch.zeros(3), torch.ones(3), torch.tensor([0, 0, 1]))
    for mode, expected in (("truncate", [2.0, 2.0, math.exp(0.1)]), ("mask", [0.0, 0.0, math.exp(0.1)])):
        weights, out = importance_weights(two, LossConfig(importance={"level": "sequence", "mode": mode}))
        assert weights.tolist() == pytest.approx(expected)
        assert out.tolist() == [True, True, False]


def test_the_distillation_advantage_is_the_clipped_difference_to_the_teacher() -> None:
    value = distillation_advantages(torch.tensor([-1.0, -5.0, -2.0]), torch.tensor([-1.5, -2.0, -4.0]), 1.0)
    assert value.tolist() == [0.5, -1.0, 1.0]


@pytest.mark.parametrize(("kind", "expected"), [("k1", -0.1), ("k2", 0.005), ("k3", 0.005171)])
def test_kl_estimators(kind: Any, expected: float) -> None:
    at = torch.tensor([-2.0], dtype=torch.float64)
    assert float(kl(kind, at, at + 0.1, 10.0)) == pytest.approx(expected, abs=1e-6)
    assert bool(kl(kind, at, at + 1000.0, 10.0).isfinite())


def test_only_k2_has_the_gradient_of_the_reverse_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    p = logprobs.detach().exp()
    found = {
        kind: torch.autograd.grad((p * kl(kind, logprobs, reference, 10.0)).sum(), logits, retain_graph=True)[0]
        for kind in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(found["k2"], exact)
    torch.testing.assert_close(found["k1"], torch.zeros_like(exact))
    assert not torch.allclose(found["k3"], exact, atol=1e-2)


PAIRS = {
    "sequences": torch.tensor([0, 0, 1, 2, 2, 2, 3]),
    "groups": torch.tensor([7, 7, 7, 8]),
    "sides": torch.tensor([1, -1, -1, 1]),
}


def test_the_contrastive_pair_loss_has_its_value_and_a_real_gradient() -> None:
    x = torch.tensor([-0.8, -1.2, -1.2, -2.0, -2.0, -2.0, -9.0], dtype=torch.float64, requires_grad=True)
    value, n_pairs = contrastive(x, **PAIRS, pair=PairLossConfig())
    assert (float(value), n_pairs) == (pytest.approx(0.3), 2)  # behind the third answer it is by 1 > 0.5
    gradient = torch.autograd.grad(value, x)[0]
    assert gradient.tolist() == pytest.approx([-0.5, -0.5, 1.0, 0.0, 0.0, 0.0, 0.0])
    value, n_pairs = contrastive(x, **PAIRS, pair=PairLossConfig(kind="infonce_pair", temperature=1.0))
    assert (float(value), n_pairs) == (pytest.approx(math.log1p(math.exp(-0.2)) + math.log1p(math.exp(-1.0))), 2)
    assert torch.autograd.gradcheck(
        lambda y: contrastive(y, **PAIRS, pair=PairLossConfig(kind="infonce_pair"))[0], (x,)
    )
    assert torch.autograd.gradcheck(lambda y: contrastive(y, **PAIRS, pair=PairLossConfig())[0], (x,))
    assert contrastive(x[:0], **(PAIRS | {"sequences": PAIRS["sequences"][:0]}), pair=PairLossConfig())[1] == 0


def test_the_ancestors_name_of_the_pair_loss_is_an_alias() -> None:
    assert PairLossConfig(kind="tentalis_cispo") == PairLossConfig(kind="contrastive_pair")


# --- what every policy loss has in common -----------------------------------------------------------------------------


VARIANTS: dict[str, LossConfig] = {kind: LossConfig(kind=kind) for kind in get_args(LossKind)} | {
    "dual_clip": LossConfig(dual_clip=1.5),
    "cispo_low": LossConfig(kind="cispo", cispo_low=0.8, cispo_high=1.2),
    "gspo_wide": LossConfig(kind="gspo", gspo_low=0.2, gspo_high=0.2),
    "gspo_clamped": LossConfig(kind="gspo", gspo_low=0.2, gspo_high=0.2, log_ratio_clamp=0.3),
    "mask": LossConfig(kind="truncated_is", importance={"mode": "mask", "low": 0.5}),
    "sequence": LossConfig(kind="truncated_is", importance={"level": "sequence"}),
    "sequence_mask": LossConfig(kind="truncated_is", importance={"level": "sequence", "mode": "mask"}),
}
EVERY = pytest.mark.parametrize("loss", VARIANTS.values(), ids=VARIANTS)


def draw(n_sequences: int = 6) -> LossTokens:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 9, 3, 7, 4][:n_sequences]
    sequences = torch.repeat_interleave(torch.arange(n_sequences), torch.tensor(lengths))
    n = len(sequences)
    sampler = -3.0 * torch.rand(n, generator=generator, dtype=torch.float64)
    logprobs = sampler + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n_sequences, generator=generator, dtype=torch.float64)[sequences]
    weights = torch.rand(n, generator=generator, dtype=torch.float64) if n_sequences else torch.ones(n)
    return LossTokens(logprobs.requires_grad_(), sampler, advantages, weights, sequences, n_sequences)


def chosen(loss_tokens: LossTokens, where: Tensor) -> LossTokens:
    return LossTokens(
        *(
            getattr(loss_tokens, name)[where]
            for name in ("logprobs", "sampler_logprobs", "advantages", "weights", "sequences")
        ),
        loss_tokens.n_sequences,
    )


def gradient(value: Tensor, point: Tensor) -> Tensor:
    return torch.autograd.grad(value, point)[0]


def frozen_reference(loss_tokens: LossTokens, loss: LossConfig) -> Callable[[Tensor], Tensor]:
    """The loss with everything that has no gradient held where it is: what finite differences must be taken of."""
    at = LossTokens(
        loss_tokens.logprobs.detach(),
        loss_tokens.sampler_logprobs,
        loss_tokens.advantages,
        loss_tokens.weights,
        loss_tokens.sequences,
        loss_tokens.n_sequences,
    )
    log_ratio = at.logprobs - at.sampler_logprobs
    if loss.kind == "cispo":
        weight = log_ratio.exp().clamp(loss.cispo_low, loss.cispo_high)
        return lambda x: -(at.weights * weight * at.advantages * x).sum()
    if loss.kind == "truncated_is":
        weight = importance_weights(at, loss)[0]
        return lambda x: -(at.weights * weight * at.advantages * (x - at.logprobs).exp()).sum()
    if loss.kind == "gspo":
        # One number per sequence: with weights 1 / length the token form is the sequence form.
        def sequence_form(x: Tensor) -> Tensor:
            clamped = (x - at.sampler_logprobs).clamp(-loss.log_ratio_clamp, loss.log_ratio_clamp)
            ratio = sequence_means(clamped, at.sequences, at.n_sequences).exp()
            bound = ratio.clamp(1 - loss.gspo_low, 1 + loss.gspo_high)
            return (at.weights * torch.maximum(-ratio * at.advantages, -bound * at.advantages)).sum()

        return sequence_form
    return lambda x: POLICY_LOSSES[loss.kind](LossTokens(x, *_rest(at)), loss)[0]


def _rest(loss_tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    at = loss_tokens
    return at.sampler_logprobs, at.advantages, at.weights, at.sequences, at.n_sequences


@EVERY
def test_finite_differences(loss: LossConfig) -> None:
    loss_tokens = draw()
    if loss.kind == "gspo":
        lengths = (
            sequence_means(torch.ones_like(loss_tokens.weights), loss_tokens.sequences, loss_tokens.n_sequences)
            / torch.bincount(loss_tokens.sequences)[loss_tokens.sequences]
        )
        loss_tokens = replace(loss_tokens, weights=lengths)
    reference = frozen_reference(loss_tokens, loss)
    ours = gradient(POLICY_LOSSES[loss.kind](loss_tokens, loss)[0], loss_tokens.logprobs)
    at, step = loss_tokens.logprobs.detach(), 1e-6
    numeric = torch.stack(
        [
            (reference(at + step * unit) - reference(at - step * unit)) / (2 * step)
            for unit in torch.eye(len(at)).double()
        ]
    )
    torch.testing.assert_close(ours, numeric, atol=1e-6, rtol=1e-5)
    assert float(ours.abs().max()) > 0


@EVERY
def test_a_permutation_and_a_split_between_sequences_leave_sum_and_gradient(loss: LossConfig) -> None:
    loss_tokens = draw()
    whole, metrics = POLICY_LOSSES[loss.kind](loss_tokens, loss)
    order = torch.randperm(len(loss_tokens.logprobs), generator=torch.Generator().manual_seed(1))
    shuffled, _ = POLICY_LOSSES[loss.kind](chosen(loss_tokens, order), loss)
    torch.testing.assert_close(whole, shuffled)
    torch.testing.assert_close(gradient(whole, loss_tokens.logprobs), gradient(shuffled, loss_tokens.logprobs))
    halves = [
        POLICY_LOSSES[loss.kind](chosen(loss_tokens, part), loss)
        for part in (loss_tokens.sequences < 3, loss_tokens.sequences >= 3)
    ]
    total = halves[0][0] + halves[1][0]
    torch.testing.assert_close(whole, total)
    torch.testing.assert_close(
        gradient(POLICY_LOSSES[loss.kind](loss_tokens, loss)[0], loss_tokens.logprobs),
        gradient(total, loss_tokens.logprobs),
    )
    for name, value in metrics.items():
        torch.testing.assert_close(value, halves[0][1][name] + halves[1][1][name])


@EVERY
def test_unequal_rewards_have_a_gradient_at_ratio_one(loss: LossConfig) -> None:
    x = torch.full((4,), -2.0, requires_grad=True)
    loss_tokens = LossTokens(x, x.detach(), torch.tensor([0.5, -0.5, -0.5, 0.5]), torch.ones(4), torch.arange(4), 4)
    value, metrics = POLICY_LOSSES[loss.kind](loss_tokens, loss)
    assert gradient(value, x).tolist() == pytest.approx([-0.5, 0.5, 0.5, -0.5])
    assert float(metrics["clipped"]) == 0.0


@EVERY
def test_the_clamp_keeps_infinities_out(loss: LossConfig) -> None:
    x = torch.tensor([0.0, -200.0], requires_grad=True)
    loss_tokens = LossTokens(
        x, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), torch.arange(2), 2
    )
    value, metrics = POLICY_LOSSES[loss.kind](loss_tokens, loss)
    assert math.isfinite(float(value))
    assert bool(gradient(value, x).isfinite().all())
    assert all(bool(each.isfinite()) for each in metrics.values())


def test_the_metrics_count_bounded_tokens() -> None:
    x = torch.log(torch.tensor([1.5, 0.5, 1.5, 1.0]))
    _, metrics = clipped(tokens(x, torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, 1.0])), LossConfig())
    assert float(metrics["clipped"]) == 2.0
