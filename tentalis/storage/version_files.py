"""The files of a version of a policy: an adapter in PEFT's format, or a whole model as transformers saves it."""

from pathlib import Path

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
WEIGHTS_NAMES = (ADAPTER_WEIGHTS, MODEL_WEIGHTS)


def read_weights(folder: Path) -> bytes | None:
    """Returns the content of the file with the weights in the folder of a version, None if there is none."""
    files = (folder / name for name in WEIGHTS_NAMES)
    return next((file.read_bytes() for file in files if file.is_file()), None)
