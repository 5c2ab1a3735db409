"""The model's interface to the engine: one padded forward pass over rows of a key/value cache, and the head."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.inference.lora import AdapterRouting, LoraAdapter, RoutedLinear, can_pack, load_adapter
from tentalis.inference.row_runs import row_runs
from tentalis.inference.whole_model import ModelSlots, ServedVersion, WholeModel, is_whole_model, whole_model_of
from tentalis.service.imports import without_collections
from tentalis.service.lifecycle import Unmendable

_ATTENTION = "tentalis_padded"
# Up to this many tokens per row are computed without repeated keys. Measured on a CPU with 3, 5 and 9 tokens: it is 1.1
# to 12 times as fast.
_FEW_QUERIES = 9


class UnsupportedModel(Unmendable):
    """The server cannot compute the model's architecture exactly; the message names the unsupported feature."""


@dataclass(frozen=True)
class AttentionRun:
    """Rows `batch` of a pass. They attend over positions 0 .. width - 1; `mask` [rows, 1, Q, width] is added."""

    batch: slice
    width: int
    mask: Tensor


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass. `rows` [R] are cache rows, `positions` [R, Q] the tokens' positions in their sequences."""

    cache: "KeyValueCache | None"
    rows: Tensor
    positions: Tensor
    # Rows 0 .. R - 1 in order; none means plain causal attention among the tokens of this pass.
    runs: Sequence[AttentionRun] = ()


class KeyValueCache:
    """Keys and values [layers, rows, heads, length, head_dim]: row r, position p holds token p of sequence r.

    Rows are padded at the right and masked by length. Memory starts zeroed: a masked value is multiplied by zero, and
    zero times an uninitialised NaN would be NaN.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, heads, head_dim)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.rows = 0
        self.length = 0
        self.clear()

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position of one row."""
        layers, heads, head_dim = self._shape
        return 2 * layers * heads * head_dim * torch.empty(0, **self._options).element_size()

    def clear(self) -> None:
        """Drop all rows and free the memory."""
        self._allocate(0, 0)

    def resize(self, rows: int, length: int, kept: int) -> None:
        """Resize to `rows` sequences of `length` tokens, keeping the first `kept` rows, cut to the new size."""
        keys, values, common = self.keys, self.values, min(length, self.length)
        self._allocate(rows, length)
        self.keys[:, :kept, :, :common] = keys[:, :kept, :, :common]
        self.values[:, :kept, :, :common] = values[:, :kept, :, :common]

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows `source[i]` to rows `target[i]`."""
        device = self.keys.device
        source_rows, target_rows = torch.tensor(source, device=device), torch.tensor(target, device=device)
        for store in (self.keys, self.values):
            store[:, target_rows, :, :length] = store[:, source_rows, :, :length]

    def load_row(self, row: int, keys: Tensor, values: Tensor, length: int) -> None:
        """Copy the first `length` positions of keys and values [layers, heads, n, head_dim] to a row."""
        self.keys[:, row, :, :length] = keys[:, :, :length]
        self.values[:, row, :, :length] = values[:, :, :length]

    def saved_row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns copies of the first `length` keys and values of a row, [layers, heads, length, head_dim]."""
        return self.keys[:, row, :, :length].clone(), self.values[:, row, :, :length].clone()

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row that may hold NaN, from position `begin` on, so that it cannot affect what comes there next."""
        self.keys[:, row, :, begin:] = 0
        self.values[:, row, :, begin:] = 0

    def _allocate(self, rows: int, length: int) -> None:
        layers, heads, head_dim = self._shape
        self.rows, self.length = rows, length
        self.keys = torch.zeros(layers, rows, heads, length, head_dim, **self._options)
        self.values = torch.zeros_like(self.keys)


class _StepCache:
    """The cache that the transformers model sees: stores the new keys and values, returns those to attend over."""

    is_compileable = False

    def __init__(self, step: ForwardPass, cache: KeyValueCache) -> None:
        self._step = step
        self._cache = cache
        heads = cache.keys.shape[2]
        head = torch.arange(heads, device=step.rows.device)[None, :, None]
        # Indices in [rows * heads * length] of the new keys and values, the same for all layers.
        flat_indices = (step.rows[:, None, None] * heads + head) * cache.length + step.positions[:, None, :]
        self._flat_indices = flat_indices.flatten()
        self._windows = [_window(step.rows[run.batch]) for run in step.runs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used: positions are given explicitly."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        """Store key, value [R, heads, Q, head_dim] at their rows and positions. Returns key and value to attend over:
        per run [rows, heads, width, head_dim], or the same ones if the step has no runs."""
        keys, values = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        head_dim = key.shape[-1]
        keys.view(-1, head_dim).index_copy_(0, self._flat_indices, key.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self._flat_indices, value.reshape(-1, head_dim))
        if not self._step.runs:
            return key, value
        runs = [(rows, run.width) for rows, run in zip(self._windows, self._step.runs, strict=True)]
        return [keys[rows, :, :width] for rows, width in runs], [values[rows, :, :width] for rows, width in runs]


def _window(rows: Tensor) -> slice | Tensor:
    """Cache rows as a slice if they are contiguous: an index copies what it reads."""
    first = int(rows[0])
    contiguous = torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device))
    return slice(first, first + len(rows)) if contiguous else rows


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | list[Tensor],
    value: Tensor | list[Tensor],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tentalis_step: ForwardPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each run of the step. query [R, Hq, Q, D], key and value as _StepCache.update returns them; returns
    [R, Q, Hq, D]."""
    if tentalis_step is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass keyword arguments to its attention. Use vLLM.")
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        return _padded_attention(query, key, value, None, scaling), None
    runs = [
        _padded_attention(query[run.batch], keys, values, run.mask, scaling)
        for run, keys, values in zip(tentalis_step.runs, key, value, strict=True)
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs), None


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention with an additive mask; None: causal. query [R, Hq, Q, D], key and value [R, Hk, T, D]; returns
    [R, Q, Hq, D]."""
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    if mask is not None and length <= (_FEW_QUERIES if query.device.type == "cpu" else 1):
        # The query heads that share a key head become its queries, so no key has to be repeated.
        grouped = query.reshape(rows, kv_heads, -1, head_dim)
        if query.device.type == "cpu":  # measured: a third faster than the fused kernel
            scores = (grouped * (head_dim**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
            scores.view(rows, kv_heads, -1, length, scores.shape[-1]).add_(mask[:, :, None])
            out = scores.softmax(dim=-1) @ value
        else:
            out = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, length, head_dim).transpose(1, 2)
    if kv_heads != heads:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return out.transpose(1, 2)


class ModelRuntime:
    """A causal language model, its tokenizer and its adapters' entry points. Not thread-safe: one thread runs it."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        with without_collections():
            from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        AttentionInterface.register(_ATTENTION, _attend)
        self.device = device
        self.dtype = str(dtype).removeprefix("torch.")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation=_ATTENTION)
        config = model.config
        _check_supported(config)
        model = model.to(device).eval().requires_grad_(False)
        self.routing = AdapterRouting()
        self.shapes: dict[str, tuple[int, int]] = {}
        self._slots = ModelSlots(model, path, dtype, device)
        linears: dict[str, RoutedLinear] = {}
        head = model.get_output_embeddings()
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module is not head:
                parent = model.get_submodule(name.rpartition(".")[0])
                linear = RoutedLinear(name, module, self.routing, can_pack(module.weight))
                setattr(parent, name.rpartition(".")[2], linear)
                linears[name] = linear
                self.shapes[name] = (linear.in_features, linear.out_features)
        self._base_model = model.base_model
        # Adapters on the head are refused: it is not in `shapes`.
        self._head = RoutedLinear("", head, AdapterRouting(), can_pack(head.weight))
        self._slots.fill(model, linears, self._head)
        self.vocab_size = self._head.out_features
        self.max_positions = int(config.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(model, self.tokenizer)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache_shape = (int(config.num_hidden_layers), int(heads), int(head_dim), dtype, device)

    def new_cache(self) -> KeyValueCache:
        """An empty cache of this model's shape."""
        return KeyValueCache(*self._cache_shape)

    def load_adapter(self, name: str, folder: Path) -> LoraAdapter:
        """See lora.load_adapter."""
        return load_adapter(name, folder, self.shapes, self.device)

    def load_version(self, name: str, folder: Path) -> ServedVersion:
        """Reads the adapter or the whole model in a folder. Raises AdapterMissing, AdapterRefused."""
        return self._slots.load(name, folder) if is_whole_model(folder) else self.load_adapter(name, folder)

    def route(self, versions: Sequence[ServedVersion | None]) -> None:
        """Sets the versions of the next pass: row i uses `versions[i]`; None means the served model. All rows have the
        same whole model, or none."""
        models = {id(model): model for version in versions for model in [whole_model_of(version)]}
        (model,) = models.values()
        self._slots.swap(model)
        adapters = [None if isinstance(version, WholeModel) else version for version in versions]
        self.routing.assign(adapters, self.device)

    def hidden(self, tokens: Tensor, step: ForwardPass) -> Tensor:
        """Last hidden states [R, Q, hidden] of `tokens` [R, Q], after storing their keys and values."""
        cache = None if step.cache is None else _StepCache(step, step.cache)
        result = self._base_model(
            input_ids=tokens,
            position_ids=step.positions,
            past_key_values=cache,
            use_cache=cache is not None,
            tentalis_step=step,
        )
        return result.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [N, vocab] of hidden states [N, hidden]."""
        return self._head(hidden).float()  # type: ignore[no-any-return]

    def prefill_step(self, cache: KeyValueCache | None, rows: Sequence[int], length: int) -> ForwardPass:
        """A pass over whole sequences from their first token, padded at the right to `length`."""
        positions = torch.arange(length, device=self.device).expand(len(rows), length)
        return ForwardPass(cache, torch.tensor(rows, device=self.device), positions)

    def continue_step(
        self, cache: KeyValueCache, lengths: Tensor, count: int, rows: Tensor | None = None
    ) -> ForwardPass:
        """A pass over the next `count` tokens (right-padded) of `rows` [n], by default 0 .. n-1, which hold `lengths`
        [n] tokens."""
        positions = lengths[:, None] + torch.arange(count, device=self.device)
        widths = (lengths + count).tolist()
        # Elsewhere than on a CPU, the cost of a run is not measured.
        batches = row_runs(widths) if self.device.type == "cpu" else [slice(0, len(widths))]
        runs = [self._attention_run(positions, batch, max(widths[batch]), cache.keys.dtype) for batch in batches]
        rows = torch.arange(len(lengths), device=self.device) if rows is None else rows
        return ForwardPass(cache, rows, positions, runs)

    def _attention_run(self, positions: Tensor, batch: slice, width: int, dtype: torch.dtype) -> AttentionRun:
        hidden = torch.arange(width, device=self.device) > positions[batch, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        mask.masked_fill_(hidden, float("-inf"))
        return AttentionRun(batch, width, mask[:, None])


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    declared = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ]
    ids: set[int] = set()
    for value in declared:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _check_supported(config: Any) -> None:
    """Refuse models that would silently give other numbers than the trainer's forward pass."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise UnsupportedModel(
            f"{config.model_type}: this server computes full attention only (the model has {sorted(kinds)}, "
            f"sliding window {window}). Serve it with vLLM."
        )
    for option in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, option, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"{config.model_type}: {option} is not supported. Serve the model with vLLM.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("longrope", "dynamic"):  # the frequencies depend on the longest sequence of a pass
        raise UnsupportedModel(f"{config.model_type}: rope_type {rope} is not supported. Serve the model with vLLM.")
