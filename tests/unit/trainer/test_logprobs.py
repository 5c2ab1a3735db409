"""Chunked log-probs, entropies and candidates: values and gradients of the plain computation, without its memory."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trainer.model.logprobs import CHUNK_BYTES, TokenScores, token_scores
from trainer.model.packed_linear import PackedLinear

V, H, M, K = 64, 8, 10, 3


class Case:
    """Random inputs, and weights for a scalar that depends on everything that comes out."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden_states = torch.randn(M, H, generator=generator).to(dtype).requires_grad_()
        self.rows = torch.randn(V, H, generator=generator).to(dtype)
        self.targets = torch.randint(V, (M,), generator=generator)
        self.temperatures = torch.rand(M, generator=generator) + 0.5
        self.candidates = torch.randint(V, (M, K), generator=generator)
        self.candidates[0, 1] = self.candidates[4] = -1
        self.weights = [torch.randn(shape, generator=generator) for shape in ((M,), (M,), (M, K))]

    def plain(self, dtype: torch.dtype = torch.float32) -> TokenScores:
        logits = self.hidden_states.to(dtype) @ self.rows.to(dtype).t() / self.temperatures.unsqueeze(1)
        distribution = logits.log_softmax(1)
        picked = distribution.gather(1, self.candidates.clamp(min=0))
        return TokenScores(
            distribution.gather(1, self.targets.unsqueeze(1)).squeeze(1),
            -(distribution.exp() * distribution).sum(1),
            picked.masked_fill(self.candidates < 0, float("-inf")),
        )

    def ours(self, entropy_gradient: bool = True) -> TokenScores:
        return token_scores(
            self.hidden_states,
            PackedLinear.of(self.rows),
            self.rows,
            self.targets,
            self.temperatures,
            self.candidates,
            entropy_gradient=entropy_gradient,
        )

    def scalar(self, scores: TokenScores) -> Tensor:
        logprobs, entropies, candidates = scores[:3]
        assert candidates is not None
        there = torch.where(self.candidates < 0, 0.0, candidates)
        parts = zip(self.weights, (logprobs, entropies, there), strict=True)
        return torch.stack([(weight * part).sum() for weight, part in parts]).sum()


@pytest.fixture(autouse=True)
def chunks_of_three(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "memory" not in request.node.name:
        monkeypatch.setattr("trainer.model.logprobs.CHUNK_BYTES", 4 * V * 3)


def test_values_and_gradients_are_those_of_log_softmax() -> None:
    case = Case()
    plain, ours = case.plain(), case.ours()
    for expected, got in zip(plain[:3], ours[:3], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    (expected,) = torch.autograd.grad(case.scalar(plain), case.hidden_states)
    (got,) = torch.autograd.grad(case.scalar(ours), case.hidden_states)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("output", range(3))
def test_each_gradient_is_the_finite_difference_of_its_value(output: int) -> None:
    case = Case(seed=output)
    for index, weight in enumerate(case.weights):
        weight.mul_(float(index == output))
    (gradient,) = torch.autograd.grad(case.scalar(case.ours()), case.hidden_states)
    step, at = 1e-4, case.hidden_states.detach().double()
    for row, column in ((0, 0), (4, 3), (9, 7)):
        values = []
        for sign in (1, -1):
            moved = at.clone()
            moved[row, column] += sign * step
            case.hidden_states = moved
            values.append(float(case.scalar(case.plain(torch.float64))))
        assert float(gradient[row, column]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-4, rel=1e-3)


def test_the_entropy_has_a_gradient_only_if_asked_for() -> None:
    assert Case().ours().entropies.requires_grad
    scores = Case().ours(entropy_gradient=False)
    assert not scores.entropies.requires_grad and scores.logprobs.requires_grad


def test_a_bfloat16_head_is_within_its_rounding() -> None:
    case = Case(torch.bfloat16)
    plain, ours = case.plain(), case.ours()
    assert ours.logprobs.dtype == torch.float32
    for expected, got in zip(plain[:3], ours[:3], strict=True):
        torch.testing.assert_close(got, expected, atol=0.1, rtol=0.02)
    (expected,) = torch.autograd.grad(case.scalar(plain), case.hidden_states)
    (got,) = torch.autograd.grad(case.scalar(ours), case.hidden_states)
    torch.testing.assert_close(got.float(), expected.float(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("probability", [0.9, 0.99, 0.998, 0.9999])
@pytest.mark.parametrize("candidates", [False, True], ids=["targets", "candidates"])
def test_the_gradient_of_a_confident_token_survives_a_bfloat16_head(probability: float, candidates: bool) -> None:
    """It is W times one minus its probability: formed as a difference of two rounded rows, nothing of it is left."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(V, 64, generator=generator).bfloat16()
    hidden = torch.randn(M, 64, generator=generator)
    for _ in range(200):  # scales each state until its likeliest token has that probability
        likeliest = (hidden @ rows.float().t()).softmax(1).amax(1, keepdim=True)
        hidden = hidden * torch.where(likeliest < probability, 1.02, 0.98)
    hidden = hidden.bfloat16().requires_grad_()
    logits = (hidden @ rows.t()).detach().double()
    best = logits.argmax(1)
    ids = torch.stack([best, (best + 1) % V, (best + 2) % V], 1)
    shares = torch.tensor([0.9, 0.07, 0.03])
    one = torch.nn.functional.one_hot
    wanted = (one(ids, V) * shares[:, None]).sum(1) if candidates else one(best, V)
    expected = (wanted - logits.softmax(1)) @ rows.double()
    scores = token_scores(hidden, PackedLinear.of(rows), rows, best, torch.ones(M), ids if candidates else None)
    value = (scores.candidates * shares).sum() if scores.candidates is not None else scores.logprobs.sum()
    (gradient,) = torch.autograd.grad(value, hidden)
    error = (gradient.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 0.02


def test_logits_of_any_size_overflow_nothing() -> None:
    case = Case()
    with torch.no_grad():
        case.hidden_states *= 1e4
    scores = case.ours()
    (gradient,) = torch.autograd.grad(scores.logprobs.sum() + scores.entropies.sum(), case.hidden_states)
    assert all(bool(part.isfinite().all()) for part in (scores.logprobs, scores.entropies, gradient))


def peak_bytes(tokens: int, vocabulary: int, chunked: bool) -> int:
    """The most that forward and backward held at a time beyond what was there before."""
    hidden = torch.randn(tokens, H, requires_grad=True)
    rows, targets = torch.randn(vocabulary, H), torch.randint(vocabulary, (tokens,))
    head, ones = PackedLinear.of(rows), torch.ones(tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        if chunked:
            token_scores(hidden, head, rows, targets, ones, entropy_gradient=True).logprobs.sum().backward()
        else:
            (hidden @ rows.t()).log_softmax(1).gather(1, targets.unsqueeze(1)).sum().backward()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_is_that_of_a_few_chunks_and_never_that_of_tokens_times_vocabulary() -> None:
    tokens, vocabulary = 2_000, 40_000
    whole = 4 * tokens * vocabulary
    assert whole > 12 * CHUNK_BYTES
    assert peak_bytes(tokens, vocabulary, chunked=False) >= 2 * whole
    assert peak_bytes(tokens, vocabulary, chunked=True) < 5 * CHUNK_BYTES
