"""Writes a small Llama of transformers as GGUF, as llama.cpp's converter does: the base model of exported adapters."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer


def write_gguf_model(folder: Path, path: Path, half: bool = False) -> Path:
    """Writes the Llama in `folder` to the file `path`, in fp32; `half`: its matrices in fp16. The rows of Q and K are
    reordered per head."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, layers = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    vocabulary = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: int(item[1]))]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    special = set(tokenizer.all_special_ids) | {0, 1, 2}
    writer.add_token_types([3 if index in special else 1 for index in range(len(vocabulary))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32)
        for kind, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{kind}." in name:
                rows = values.shape[0]
                values = values.reshape(count, 2, rows // count // 2, -1).swapaxes(1, 2).reshape(rows, -1)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        stored = values.half() if half and values.ndim > 1 else values
        writer.add_tensor(target, stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
