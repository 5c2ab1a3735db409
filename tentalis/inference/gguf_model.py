"""Converts a GGUF file to a folder with fp32 safetensors and a tokenizer, once per file."""

import json
import os
import struct
from pathlib import Path

from tentalis.inference.model_download import ModelNotFound, ProgressCallback

# The turn's end in ChatML. GGUF readers take the text's end from the file, which may name another token.
_TURN_END = "<|im_end|>"


def convert_gguf(gguf: Path, target_dir: Path, title: str, source: str, progress: ProgressCallback) -> None:
    """Writes the model in `gguf` to the new folder `target_dir`. `source`: the id or path that its configuration names.

    Raises ModelNotFound if transformers cannot read the file.
    """
    # Our own progress is shown instead; transformers' GGUF reader knows only tqdm's variable, read at its import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # save_pretrained() imports DeepSpeed, which warns on a machine without a GPU that it found none.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    activity = f"converting {title} to safetensors (once)"
    progress(activity, 0, 3)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        progress(activity, 1, 3)
        loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    except (ValueError, LookupError, OSError, NotImplementedError, struct.error) as error:
        raise ModelNotFound(
            f"{gguf} cannot be read as a model: {error}. Give a GGUF file of an architecture that transformers "
            "converts (Llama, Qwen2, Qwen3, ...), or a folder with safetensors."
        ) from error
    if _TURN_END in str(tokenizer.chat_template) and _TURN_END in tokenizer.get_vocab():
        tokenizer.eos_token = tokenizer.pad_token = _TURN_END
    tokenizer.clean_up_tokenization_spaces = False
    config = loaded.config
    # With this entry, save_pretrained() and from_pretrained() treat the fp32 weights as quantised and refuse them.
    vars(config).pop("quantization_config", None)
    config._name_or_path = source
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)  # the same memory: a second copy may not fit
    model.tie_weights()
    model.generation_config = loaded.generation_config
    progress(activity, 2, 3)
    target_dir.mkdir()
    # Any rank of a trainer may be the one that converts: on another node, each has files of its own. Left to itself,
    # save_pretrained() writes on rank 0 alone.
    model.should_save_on_this_rank = _saves
    model.save_pretrained(str(target_dir))
    tokenizer.save_pretrained(str(target_dir))
    written = json.loads((target_dir / "config.json").read_text())
    if "quantization_config" in written:
        raise RuntimeError("The converted model still carries a quantization_config.")
    _sync_folder(target_dir)
    progress(activity, 3, 3)


def _saves(is_main_process: bool) -> bool:
    return is_main_process


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk before a rename makes it visible, so that a power loss cannot leave a partial model."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
