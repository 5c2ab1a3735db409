"""Packed attention: that of every sequence alone, by SDPA on any device and by flash attention on a GPU."""

import pytest
import torch
from torch import Tensor, nn

from trainer.data.pack import PackedSpan, layout_of
from trainer.model.attention import _flash_attention, packed_attention

HEADS, KV_HEADS, SIZE = 4, 2, 16
# A prompt with two samples, and another with one.
SPANS = (
    PackedSpan(0, 5, 0, 0),
    PackedSpan(5, 12, 0, 5),
    PackedSpan(12, 14, 0, 5),
    PackedSpan(14, 17, 17, 17),
    PackedSpan(17, 26, 14, 17),
)
SCALE = 0.3


def inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, SPANS[-1].end, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [each.requires_grad_() for each in made]


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One softmax over the whole of [T, T], in float32, by the definition of who sees whom."""
    size = query.shape[2]
    sees = torch.zeros(size, size, dtype=torch.bool, device=query.device)
    for span in SPANS:
        sees[span.start : span.end, span.prefix_start : span.prefix_end] = True
        sees[span.start : span.end, span.start : span.end] = torch.ones(
            span.end - span.start, span.end - span.start
        ).tril()
    key, value = (each.float().repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = (query.float() @ key.transpose(2, 3) * SCALE).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def compare(dtype: torch.dtype, device: str, tolerance: float) -> None:
    given = inputs(dtype, device)
    ours, _ = packed_attention(nn.Module(), *given, None, SCALE, spans=SPANS, layout=layout_of(SPANS, device))
    expected = plain(*given)
    assert ours.shape == expected.shape == (1, SPANS[-1].end, HEADS, SIZE)
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    gradients = [torch.autograd.grad((each.float() * weights).sum(), given) for each in (ours, expected)]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, atol=4 * tolerance, rtol=4 * tolerance)


def test_no_span_sees_another_sample() -> None:
    compare(torch.float32, "cpu", 1e-5)


def test_the_layout_gathers_each_spans_prompt_before_its_own_keys() -> None:
    layout = layout_of(SPANS, "cpu")
    assert layout.queries.tolist() == [0, 5, 12, 14, 17, 26]
    assert layout.keys.tolist() == [0, 5, 17, 24, 27, 39]
    assert (layout.longest_queries, layout.longest_keys) == (9, 12)
    for index, span in enumerate(SPANS):
        rows = layout.rows[layout.keys[index] : layout.keys[index + 1]].tolist()
        assert rows == [*range(span.prefix_start, span.prefix_end), *range(span.start, span.end)]


@pytest.mark.parametrize("has_argument", [True, False])
def test_the_kernel_is_told_of_fewer_key_heads_where_it_can_be_told(
    has_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def newer(query: Tensor, *_: object, scale: float, window_size: object, enable_gqa: bool = False) -> Tensor:
        told.append(enable_gqa)
        return query

    def older(query: Tensor, *_: object, scale: float, window_size: tuple[int, int]) -> Tensor:
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if has_argument else older)
    query, key, value = (each[0] for each in inputs(torch.float32, "cpu"))
    layout = layout_of(SPANS, "cpu")
    assert _flash_attention(query, key, value, SCALE, layout).shape == query.transpose(0, 1).shape
    assert _flash_attention(query, query, query, SCALE, layout).shape == query.transpose(0, 1).shape
    assert told == ([True, False] if has_argument else [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA GPU, there is none here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_too(dtype: torch.dtype) -> None:
    compare(dtype, "cuda", 1e-5 if dtype == torch.float32 else 2e-2)
