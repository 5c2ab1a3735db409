"""One off-policy token in a batch of honest ones: the direction of the gradient with it and without it.

The table in docs/concepts/losses.md is the output of `python -m tests.unit.trainer.test_off_policy_token`.
"""

import pytest
import torch

from tests.support import ROOT
from trainer.config.loss import LossConfig
from trainer.losses.registry import POLICY_LOSSES
from trainer.losses.tokens import LossTokens

VOCABULARY, WIDTH, HONEST = 32, 16, 256
RATIOS = (1.5, 3.0, 10.0, 100.0, 3000.0)
LOSSES = {
    "clipped, dual_clip: null": LossConfig(dual_clip=None),
    "clipped (default, dual_clip: 3)": LossConfig(),
    "cispo": LossConfig(kind="cispo"),
    "masked": LossConfig(kind="masked"),
    "truncated_is": LossConfig(kind="truncated_is"),
}


def cosine(loss: LossConfig, ratio: float) -> float:
    """Returns the cosine between the gradients of a linear softmax policy over 256 on-policy tokens, and over the same
    tokens and one more, which has a negative advantage and pi / mu = ratio."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = normal(WIDTH, VOCABULARY).requires_grad_()
    states, advantages = normal(HONEST + 1, WIDTH), normal(HONEST + 1)
    logprobs_of_all = torch.log_softmax(states @ head, -1)
    chosen = torch.multinomial(logprobs_of_all.detach().exp(), 1, generator=generator)
    logprobs = logprobs_of_all.gather(1, chosen)[:, 0]
    sampler = logprobs.detach() + 0.02 * normal(HONEST + 1)
    advantages[-1], sampler[-1] = -1.0, logprobs.detach()[-1] - torch.tensor(ratio).log()

    def gradient(count: int) -> torch.Tensor:
        ones = torch.ones(count, dtype=torch.float64)
        tokens = LossTokens(logprobs[:count], sampler[:count], advantages[:count], ones, torch.arange(count), count)
        (found,) = torch.autograd.grad(POLICY_LOSSES[loss.kind](tokens, loss)[0], head, retain_graph=True)
        return found.flatten()

    return float(torch.cosine_similarity(gradient(HONEST), gradient(HONEST + 1), dim=0))


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_off_policy_token_does_not_turn_a_batch(ratio: float) -> None:
    assert cosine(LossConfig(), ratio) > 0.95


def test_without_dual_clip_it_would() -> None:
    assert cosine(LossConfig(dual_clip=None), 3000.0) < 0.2


def table() -> str:
    """Returns the table of the page."""
    rows = [[name, *(f"{cosine(loss, ratio):.3f}" for ratio in RATIOS)] for name, loss in LOSSES.items()]
    head = ["loss", *(f"rho {ratio:g}" for ratio in RATIOS)]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def test_the_page_has_this_table() -> None:
    assert table() in (ROOT / "docs" / "concepts" / "losses.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
