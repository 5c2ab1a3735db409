"""The compute environment of a process: threads, determinism, versions. All of it is in the run's manifest."""

import os
from collections.abc import Iterable
from importlib.metadata import version

import torch

from tentalis.service.lifecycle import Unmendable
from trainer.config.trainer_config import TrainerConfig
from trainer.distributed.environment import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_DEFAULT
from trainer.distributed.rank_place import rank_place

PACKAGES = ("tentalis", "torch", "transformers", "peft", "deepspeed", "safetensors")


_configured_device: str | None = None


class NoDevice(Unmendable):
    """The machine lacks the configured device."""


def configure_torch(threads: int, device: str) -> None:
    """Fixes everything that floating point sums depend on: the number of threads, deterministic kernels, no reduced
    precision. Afterwards `cuda` means this rank's GPU. Raises NoDevice, BadVariable."""
    global _configured_device
    _configured_device = device
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills every new tensor with NaN before use, which takes a tenth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cuda":
        # CUDA reads it at its start; deterministic matrix products need it.
        os.environ.setdefault(CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_DEFAULT)
        torch.cuda.set_device(gpu_of(rank_place().local_rank, torch.cuda.device_count()))
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False


def gpu_of(local_rank: int, gpus: int) -> int:
    """Returns the GPU of a rank, one of `gpus` on its machine: each rank has its own. Raises NoDevice."""
    if local_rank >= gpus:
        raise NoDevice(
            f"each rank on cuda needs its own GPU, and torch finds {gpus} on this machine: none for rank "
            f"{local_rank}. Start at most as many ranks as there are GPUs, or set device: cpu"
        )
    return local_rank


def device_is_usable(device: str) -> bool:
    """True if this process can compute on a device: DeepSpeed keeps the device with which it started."""
    return _configured_device in (None, device)


def resolve_device(config: TrainerConfig) -> str:
    """Returns `cpu` or `cuda`."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def base_dtype_of(config: TrainerConfig, device: str) -> torch.dtype:
    """Returns the dtype of the base weights on a device (`cpu` or `cuda`); trained ones are float32."""
    if config.lora is None:
        return torch.float32
    if config.base_dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if config.base_dtype == "bfloat16" else torch.float32


def threads_of(config: TrainerConfig) -> int:
    """Returns the CPU threads of this rank: the ranks of a machine share its cores. Raises BadVariable."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // rank_place().local_size)


def instruction_set(device: str) -> str:
    """Returns what determines the choice of kernels: the CPU's vector instructions, or the GPU's name and
    capability."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return torch.backends.cpu.get_cpu_capability()


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of the packages that affect the result."""
    return {package: version(package) for package in packages}
