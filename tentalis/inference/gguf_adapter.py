"""Writes a LoRA adapter as a GGUF file: llama.cpp (`--lora`) and Ollama (`ADAPTER`) load it beside a GGUF base model.

Each changed layer has two tensors, `<layer>.weight.lora_a` [r, in] and `<layer>.weight.lora_b` [out, r], under
llama.cpp's name of the layer. llama.cpp multiplies their product by alpha / r; where PEFT's factor is another (rsLoRA,
patterns), B is scaled instead. GGUF files of Llama have the rows of Q and K in another order than transformers, so B's
rows have too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tentalis.inference.lora import AdapterRefused, read_pairs, scaling_of

# transformers' model_type -> llama.cpp's architecture, and whether the rows of Q and K are in another order there.
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}


@dataclass(frozen=True, slots=True)
class GGUFAdapter:
    """A written file. `layers`: the number of linear layers that it changes."""

    path: Path
    architecture: str
    layers: int
    rank: int
    alpha: float


def write_gguf_adapter(adapter: Path, base: Path, path: Path, name: str) -> GGUFAdapter:
    """Writes the PEFT adapter in the folder `adapter`, for the model in the folder `base`, to the new file `path`.

    `name`: the version, kept in the file. Raises AdapterRefused, AdapterMissing, OSError.
    """
    import gguf

    model = _model_config(base)
    architecture, permuted = ARCHITECTURES[model["model_type"]]
    config, pairs, _ = read_pairs(adapter)
    layers = int(model["num_hidden_layers"])
    enumerated = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(enumerated, layers)
    rank, alpha = int(config["r"]), float(config.get("lora_alpha", config["r"]))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(name)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for module, sides in sorted(pairs.items()):
        layer = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if layer is None:
            raise AdapterRefused(f"{adapter}: llama.cpp's {architecture} has no layer for {module!r}.")
        if set(sides) != {"A", "B"}:
            raise AdapterRefused(f"{adapter}: {module!r} lacks lora_{'B' if 'A' in sides else 'A'}.")
        a, b = sides["A"].float(), sides["B"].float()
        factor = scaling_of(config, module, a.shape[0]) * a.shape[0] / alpha if alpha else 1.0
        b = b if factor == 1.0 else b * factor
        if permuted and module.endswith(("q_proj", "k_proj")):
            b = _llama_rows(b, _heads(model, module), module, adapter)
        writer.add_tensor(f"{layer}.lora_a", a.contiguous().numpy())
        writer.add_tensor(f"{layer}.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFAdapter(path, architecture, len(pairs), rank, alpha)


def _model_config(base: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{base / 'config.json'} cannot be read: {error}") from error
    if config.get("model_type") not in ARCHITECTURES:
        raise AdapterRefused(
            f"{base} is a model of type {config.get('model_type')!r}; a GGUF adapter can be written for "
            f"{', '.join(sorted(ARCHITECTURES))}. --format merged works for every model"
        )
    return config


def _heads(model: dict[str, Any], module: str) -> int:
    heads = int(model["num_attention_heads"])
    return heads if module.endswith("q_proj") else int(model.get("num_key_value_heads") or heads)


def _llama_rows(b: Tensor, heads: int, module: str, adapter: Path) -> Tensor:
    """Reorders the rows of B [out, r] per head, from rotary halves (transformers) to pairs (llama.cpp)."""
    rows, rank = b.shape
    if rows % (2 * heads):
        raise AdapterRefused(f"{adapter}: {module!r} has {rows} rows, which {heads} heads do not divide in pairs.")
    return b.reshape(heads, 2, rows // heads // 2, rank).transpose(1, 2).reshape(rows, rank)
