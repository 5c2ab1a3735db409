"""Writes a model with a LoRA adapter merged into its weights: a folder that every server of such models loads."""

import os
import shutil
from pathlib import Path

from tentalis.inference.lora import AdapterRefused


def write_merged_model(adapter: Path, base: Path, target: Path) -> None:
    """Writes the model in the folder `base` with the PEFT adapter in the folder `adapter` to the new folder `target`,
    in the base's precision, with its tokenizer.

    Its logits equal those of the base with the adapter, up to the rounding of that precision. Raises AdapterRefused,
    OSError.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # save_pretrained() imports DeepSpeed, which warns on a machine without a GPU that it found none.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(str(base), dtype="auto")
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
        tokenizer = AutoTokenizer.from_pretrained(str(base))
    except (ValueError, RuntimeError, LookupError) as error:
        raise AdapterRefused(f"{adapter} cannot be merged into {base}: {error}") from error
    target.mkdir()
    try:
        merged.save_pretrained(str(target))
        tokenizer.save_pretrained(str(target))
    except BaseException:
        shutil.rmtree(target)
        raise
