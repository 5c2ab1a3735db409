"""A GGUF file as small as can be: a Llama of one layer whose tokenizer has the letters as tokens."""

import string
from pathlib import Path

import numpy as np

HIDDEN = 32


def tiny_gguf(path: Path) -> Path:
    """Writes the file, with zeros as weights, and returns its path."""
    import gguf

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *string.ascii_lowercase, "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "c d"])
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        **{f"blk.0.{name}": (HIDDEN, HIDDEN) for name in square},
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
