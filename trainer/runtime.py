"""How the process computes: threads, determinism, versions. All of it is in the run's manifest."""

import os
from collections.abc import Iterable
from importlib.metadata import version

import torch

from trainer.config import TrainerConfig

PACKAGES = ("tentalis", "torch", "transformers", "peft", "deepspeed", "safetensors")


def prepare(threads: int, device: str) -> None:
    """Fixes what sums depend on: the number of threads, deterministic kernels, no reduced precision."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # With the above torch also fills every new tensor with NaN before something is written into it: a tenth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cuda":
        # Read when CUDA starts; deterministic matrix products need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False


def device_of(config: TrainerConfig) -> str:
    """`cpu` or `cuda`."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def threads_of(config: TrainerConfig, world_size: int) -> int:
    """CPU threads of one rank."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // world_size)


def instruction_set(device: str) -> str:
    """What kernels the device picks: the CPU's vector instructions, or the GPU's name and capability."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return torch.backends.cpu.get_cpu_capability()


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of what the result depends on."""
    return {package: version(package) for package in packages}
