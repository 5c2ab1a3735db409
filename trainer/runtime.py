"""How the process computes: threads, determinism, versions. All of it is in the run's manifest."""

import os
from collections.abc import Iterable
from importlib.metadata import version

import torch

from tentalis.service import Unmendable
from trainer.config import TrainerConfig

PACKAGES = ("tentalis", "torch", "transformers", "peft", "deepspeed", "safetensors")


_prepared: str | None = None


class NoDevice(Unmendable):
    """The machine lacks the device that the configuration asks for."""


def prepare(threads: int, device: str) -> None:
    """Fixes what sums depend on: the number of threads, deterministic kernels, no reduced precision. From then on
    `cuda` means this rank's GPU. Raises NoDevice."""
    global _prepared
    _prepared = device
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # With the above torch also fills every new tensor with NaN before something is written into it: a tenth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cuda":
        # Read when CUDA starts; deterministic matrix products need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(gpu_of(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()))
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False


def gpu_of(local_rank: int, gpus: int) -> int:
    """The GPU of a rank, one of `gpus` on its machine: each rank has its own. Raises NoDevice."""
    if local_rank >= gpus:
        raise NoDevice(
            f"each rank on cuda needs a GPU of its own, and torch finds {gpus} on this machine: none for rank "
            f"{local_rank}. Start as many ranks as there are GPUs, or set device: cpu"
        )
    return local_rank


def usable(device: str) -> bool:
    """Whether this process can compute on a device: DeepSpeed keeps to the one that it began with."""
    return _prepared in (None, device)


def device_of(config: TrainerConfig) -> str:
    """`cpu` or `cuda`."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def base_dtype_of(config: TrainerConfig) -> torch.dtype:
    """What the frozen base weights are held in."""
    return torch.bfloat16 if config.base_dtype == "bfloat16" else torch.float32


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
