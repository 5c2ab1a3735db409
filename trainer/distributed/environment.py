"""Source, Python, processor and variables: they change the bytes of a step, as configuration, versions and threads do.

All of it is in the run's manifest, by name; a replay names what differs.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import schemas
import trainer

CONFIG_FILE = "config.json"
SOURCE = "source"
DRIVER_VERSION = "/proc/driver/nvidia/version"
"""The file in which the driver of NVIDIA's GPUs names itself; its first line has version and date of its build."""
VARIABLE = "variable "
"""Prefix of the names of variables in a manifest."""
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""The variables by which libraries select kernels."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE_DEFAULT = ":4096:8"
"""The trainer's value of CUBLAS_WORKSPACE_CONFIG: deterministic matrix products on CUDA need one."""
_COMPUTING = ("advantages", "config", "data", "distributed", "losses", "model", "step")
"""The packages of the trainer that compute a step."""
_NOT_COMPUTING = frozenset({"_name_or_path", "transformers_version"})
"""Settings of a model's config.json without an effect on its output."""


def environment(model_folder: Path, device: str, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns name -> value of what changes the bytes of a step on this machine."""
    found = {
        SOURCE: source_digest(),
        CONFIG_FILE: model_config_digest(model_folder),
        "processor": processor(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    if device == "cuda":
        import torch

        found |= {"cuda": str(torch.version.cuda), "driver": _first_line(DRIVER_VERSION, "")}
        # A replay compares before its ranks set it.
        variables = {CUBLAS_WORKSPACE: CUBLAS_WORKSPACE_DEFAULT} | dict(variables)
    return found | {VARIABLE + name: variables[name] for name in VARIABLES if name in variables}


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns what differs: name -> (recorded, here), "not set" where one lacks it. What a manifest of an earlier
    release did not record cannot be compared; a variable that a manifest lacks was not set."""
    if not recorded:
        return {}
    names = sorted({*recorded, *(name for name in here if name.startswith(VARIABLE))})
    pairs = {name: (recorded.get(name, "not set"), here.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def source_digest() -> str:
    """sha256 (hex) over the installed source that computes a step: path and content of each module, in path order."""
    root = Path(trainer.__path__[0])
    folders = (*(root / name for name in _COMPUTING), Path(schemas.__path__[0]))
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            name = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def model_config_digest(model_folder: Path) -> str:
    """sha256 (hex) of the settings in a model's config.json that can change its output."""
    settings = json.loads((model_folder / CONFIG_FILE).read_bytes())
    kept = {name: value for name, value in settings.items() if name not in _NOT_COMPUTING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def processor() -> str:
    """The CPU's model: libraries choose kernels by it, not by the instruction set alone."""
    return _first_line("/proc/cpuinfo", "model name").partition(":")[2].strip() or platform.processor()


def _first_line(file: str, beginning: str) -> str:
    """Returns the first line of a file with that beginning; "" if there is none."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith(beginning)), "")
