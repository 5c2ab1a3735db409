"""Drawing tokens: the right distribution, its log-probs, and seeds."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.sampling import DrawnTokens, allow_only, draw, penalise, uniforms


def drawn(logits: torch.Tensor, uniform: np.ndarray, temperature=1.0, top_p=1.0, top_k=0, width=0) -> DrawnTokens:  # type: ignore
    rows = len(logits)
    return draw(
        logits.clone(),
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_p, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
        np.asarray(uniform, dtype=np.float64),
        width,
    )


def processed(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """The log-probs of one row by the definition: temperature, then top-k, then the smallest set of top_p mass."""
    values = (logits / temperature).double()
    order = sorted(range(len(values)), key=lambda i: -values[i].item())
    if top_k:
        order = order[:top_k]
    mass = torch.softmax(values[order], dim=0).tolist()
    kept, before = [], 0.0
    for token, share in zip(order, mass, strict=True):
        if before < top_p or not kept:
            kept.append(token)
        before += share
    result = torch.full_like(values, float("-inf"))
    result[kept] = torch.log_softmax(values[kept], dim=0)
    return result


def test_an_even_grid_of_uniforms_gives_every_token_its_share() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 2
    count = 20_000
    found = drawn(logits.expand(count, -1), (np.arange(count) + 0.5) / count)
    shares = torch.bincount(found.tokens, minlength=1000)
    expected = logits[0].double().softmax(0) * count
    assert (shares - expected).abs().max() <= 1.01  # fp32 probabilities move a boundary by at most one grid point


def test_top_k_and_top_p_restrict_and_renormalise() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)) * 3
    for temperature, top_p, top_k in [(0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 5), (0.9, 0.6, 7), (1.0, 0.01, 0)]:
        expected = processed(logits[0], temperature, top_p, top_k)
        found = drawn(logits.expand(512, -1), (np.arange(512) + 0.5) / 512, temperature, top_p, top_k)
        assert torch.allclose(found.logprobs.double(), expected[found.tokens], atol=1e-5)
        likely = set(torch.nonzero(expected > np.log(2 / 512))[:, 0].tolist())
        assert likely <= set(found.tokens.tolist()) <= set(torch.nonzero(expected.isfinite())[:, 0].tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-30.0, -1.0, 0.0, 2.5]), min_size=1, max_size=700),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
)
def test_a_token_outside_the_distribution_is_never_drawn(values: list[float], uniform: float, top_k: int) -> None:
    logits = torch.tensor([values])
    found = drawn(logits, np.array([uniform]), top_k=top_k)
    assert torch.isfinite(found.logprobs).all()
    if top_k:
        assert (logits[0] > logits[0, found.tokens[0]]).sum() < top_k


def test_the_ends_of_the_unit_interval_hit_real_tokens() -> None:
    logits = torch.full((2, 515), float("-inf"))
    logits[:, [3, 400]] = 0.0
    found = drawn(logits, np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert found.tokens.tolist() == [3, 400]


def test_temperature_zero_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    found = draw(
        logits.clone(), np.array([0, 1], np.float32), np.ones(2, np.float32), np.zeros(2, np.int64), np.array([0.99, 0])
    )
    assert found.tokens.tolist() == [1, 0]
    assert torch.allclose(found.logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    temperature, top_p, top_k = (
        np.array([0.5, 1, 2], np.float32),
        np.array([1, 0.5, 1], np.float32),
        np.array([0, 0, 4]),
    )
    found = draw(logits.clone(), temperature, top_p, top_k, np.array([0.3, 0.6, 0.9]))
    for row in range(3):
        expected = processed(logits[row], float(temperature[row]), float(top_p[row]), int(top_k[row]))
        assert abs(found.logprobs[row] - expected[found.tokens[row]]) < 1e-5


def test_the_likeliest_alternatives_are_those_of_the_processed_distribution() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    found = drawn(logits, np.array([0.5]), temperature=0.5, width=4)
    expected = (logits / 0.5).log_softmax(-1).topk(4)
    assert found.top_tokens is not None and found.top_logprobs is not None
    assert found.top_tokens.tolist() == expected.indices.tolist()
    assert torch.allclose(found.top_logprobs, expected.values, atol=1e-5)


def test_broken_logits_are_reported() -> None:
    logits = torch.zeros(3, 300)
    logits[1, 7] = float("nan")
    logits[2, 7] = float("inf")
    assert drawn(logits, np.full(3, 0.5)).finite.tolist() == [True, False, False]


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    first = uniforms(7, 0, 5)
    assert np.array_equal(first, uniforms(7, 0, 5))
    assert np.array_equal(first[:3], uniforms(7, 0, 3))
    assert not np.array_equal(first, uniforms(7, 1, 5))
    assert not np.array_equal(first, uniforms(-7, 0, 5))
    assert not np.array_equal(uniforms(None, 0, 5), uniforms(None, 0, 5))


def test_penalties_lower_the_logits_of_earlier_tokens_by_their_count() -> None:
    logits = torch.zeros(2, 5)
    penalise(logits[0], [3, 1, 3, 3], presence=0.5, frequency=0.25)
    assert logits.tolist() == [[0.0, -0.75, 0.0, -1.25, 0.0], [0.0] * 5]


def test_a_restricted_row_leaves_the_others_bit_for_bit() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    allowed = np.zeros(300, dtype=bool)
    allowed[[7, 9]] = True
    restricted = logits.clone()
    allow_only(restricted[1], allowed)
    plain, found = (drawn(each, np.array([0.2, 0.9, 0.7])) for each in (logits, restricted))
    assert plain.tokens[[0, 2]].equal(found.tokens[[0, 2]]) and plain.logprobs[[0, 2]].equal(found.logprobs[[0, 2]])
    assert found.tokens[1] in (7, 9)
    expected = logits[1, [7, 9]].log_softmax(-1)[[7, 9].index(int(found.tokens[1]))]
    assert torch.allclose(found.logprobs[1], expected, atol=1e-6)
