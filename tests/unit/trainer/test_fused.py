"""The GPU's forms of a decoder's parts compute what they replace; on a CPU they are not used."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from tests.support.trainer_lab import tiny_model
from trainer.config.trainer_config import LoraShape
from trainer.distributed.runtime import base_dtype_of
from trainer.model.fused import fuse_elementwise, rotate_halves
from trainer.model.lora import lora_linear
from trainer.model.model import LoraPolicy
from trainer.model.packed_linear import PackedLinear

IDS = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_rotations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets transformers' rotations back: they are replaced for the process."""
    with monkeypatch.context() as patch:
        for module in (modeling_llama, modeling_qwen3):
            patch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
        yield


def qwen() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.ndim == 2 else 0.7)
    return model


def gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of a sequence, and the gradient of a weighted sum of them with respect to every matrix."""
    model.zero_grad()
    logprobs = model(IDS).logits.log_softmax(-1)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2))
    (logprobs * weights).sum().backward()
    return logprobs.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.ndim == 2 and p.grad is not None
    }


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_replaced_parts_have_the_same_values_and_gradients(family: str, tmp_path: Path) -> None:
    model = qwen() if family == "qwen3" else LlamaForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    logprobs, expected = gradients(model)
    assert fuse_elementwise(model.model) == ["activation", "norm", "rotation"]
    again, found = gradients(model)
    torch.testing.assert_close(again, logprobs, atol=1e-5, rtol=1e-4)
    assert not torch.equal(again, logprobs)  # Another order of roundings: it really is the replacement.
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-3)


def test_a_part_that_computes_something_else_keeps_its_own() -> None:
    model = qwen()

    class Shifted(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            shifted: Tensor = super().forward(x) + 1.0
            return shifted

    def interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return query * cos.unsqueeze(1), key * cos.unsqueeze(1)

    modeling_qwen3.apply_rotary_pos_emb = interleaved
    model.model.norm.__class__ = Shifted
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    logprobs, _ = gradients(model)
    assert fuse_elementwise(model.model) == ["norm"]
    torch.testing.assert_close(gradients(model)[0], logprobs, atol=1e-5, rtol=1e-4)
    assert modeling_qwen3.apply_rotary_pos_emb is interleaved
    assert "forward" not in vars(model.model.norm)


def test_on_a_cpu_nothing_is_replaced(tmp_path: Path) -> None:
    LoraPolicy(tiny_model(tmp_path / "model"), "base", LoraShape(rank=2), 0, "cpu", torch.float32)
    assert modeling_llama.apply_rotary_pos_emb is not rotate_halves


def lora_gradients(dtype: torch.dtype, narrow: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, weight, a, b = (torch.randn(shape, generator=draw) for shape in ((50, 24), (40, 24), (4, 24), (40, 4)))
    x = x.to(dtype).requires_grad_()
    a, b = a.requires_grad_(), b.requires_grad_()
    y = lora_linear(x, PackedLinear.of(weight.to(dtype)), a, b, 0.5, narrow=narrow)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert a.grad is not None and b.grad is not None and x.grad is not None
    assert a.grad.dtype == b.grad.dtype == torch.float32
    return [y.detach().float(), x.grad.float(), a.grad, b.grad]


def test_narrow_products_with_the_adapter_differ_by_bfloat16s_rounding_only() -> None:
    expected = lora_gradients(torch.float32, narrow=False)
    for wide, narrow, exact in zip(
        lora_gradients(torch.bfloat16, narrow=False), lora_gradients(torch.bfloat16, narrow=True), expected, strict=True
    ):
        scale = float(exact.abs().max())
        torch.testing.assert_close(wide, exact, atol=0.02 * scale, rtol=0)
        torch.testing.assert_close(narrow, exact, atol=0.02 * scale, rtol=0)
    # With a float32 base there is nothing to narrow.
    for left, right in zip(expected, lora_gradients(torch.float32, narrow=True), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_base_is_bfloat16_on_a_gpu_unless_it_is_set(
    setting: str, device: str, expected: torch.dtype, tmp_path: Path
) -> None:
    from tests.support.trainer_lab import config

    assert base_dtype_of(config(tmp_path, base_dtype=setting), device) == expected
