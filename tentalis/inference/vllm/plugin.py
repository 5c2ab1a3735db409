"""A plugin that vLLM loads into each of its processes: corrects the LoRA operations of its CPU build.

vLLM marks the tokens of the base model with adapter index -1. Its GPU kernels skip them. The operations in torch, which
the CPU build uses, index with -1 instead and add the last adapter's change: a request for the base model in one batch
with requests for adapters is answered by an adapter (vllm-project/vllm#48421, open with vLLM 0.32).

The CPU build also expects one row per request where it applies an adapter to the head, but gets one per token when a
request asks for the log-probs of its prompt, and its engine ends. No adapter of ours changes the head, so that step is
left out while every adapter's is zero.

This module is copied beside vLLM (command.py) and runs in vLLM's own environment: it imports nothing of ours.
"""

from collections.abc import Callable
from typing import Any

_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
_PATCHED = "_skips_base_rows"


def install() -> None:
    """Patches the LoRA operations of vLLM's CPU build (see the module docstring); does nothing on a GPU. vLLM calls
    it through the entry point group vllm.general_plugins."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _OPERATIONS:
        original = getattr(lora_ops, name)
        if hasattr(original, _PATCHED):
            continue
        corrected = skipping_base_rows(original)
        setattr(lora_ops, name, corrected)
        setattr(punica_cpu, name, corrected)
    wrapper = punica_cpu.PunicaWrapperCPU
    if not hasattr(wrapper.add_lora_logits, _PATCHED):
        wrapper.add_lora_logits = skipping_bare_heads(wrapper.add_lora_logits)


def skipping_base_rows(operation: Callable[..., None]) -> Callable[..., None]:
    """Returns `operation` without an effect on the rows whose adapter index is negative.

    `operation(inputs, weights, output, indices, ...)` changes `output` [N, out] in place, row by row.
    """

    def corrected(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> None:
        base = (indices[: len(output)] < 0).nonzero()[:, 0]
        kept = output[base]  # a copy
        operation(inputs, weights, output, indices.clamp(min=0), *rest, **named)
        output[base] = kept

    setattr(corrected, _PATCHED, True)
    return corrected


def skipping_bare_heads(operation: Callable[..., None]) -> Callable[..., None]:
    """Returns an operation that applies an adapter to the head, with `operation(wrapper, logits, hidden, lora_a,
    lora_b, ...)` skipped while `lora_b` is zero."""

    def corrected(wrapper: Any, logits: Any, hidden: Any, lora_a: Any, lora_b: Any, *rest: Any, **named: Any) -> None:
        if bool(lora_b.any()):
            operation(wrapper, logits, hidden, lora_a, lora_b, *rest, **named)

    setattr(corrected, _PATCHED, True)
    return corrected
