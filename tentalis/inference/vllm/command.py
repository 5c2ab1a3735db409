"""The command and the environment that start vLLM such that its samples can be trained on. Pure but for the lookups."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tentalis.inference.logprobs_check import MENDING_FLAG
from tentalis.inference.vllm import plugin
from tentalis.service.lifecycle import Unmendable

FOLDER = "vllm"
"""The folder of vLLM's environment in the cache, where `make vllm` installs it."""
PLUGIN = "tentalis_vllm"
_DRIVER = Path("/proc/driver/nvidia/version")
# Adapters in one batch: each takes memory for a slot of the highest rank.
_MOST_SLOTS = 8
_LONGEST_DEFAULT = 2048
# The ranks that --max-lora-rank may name.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmMissing(Unmendable):
    """vLLM is not installed where it was looked for."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of a vLLM server.

    Attributes:
        model: folder of the base model.
        served_name: name of the base model in requests.
        dtype: `float32`, `bfloat16` or `float16`.
        max_model_len: longest context in tokens.
        max_adapters: most adapters that stay in memory; up to 8 of those are in one batch.
        max_rank: highest LoRA rank.
        tool_parser: vLLM's parser of tool calls; empty for none.
        gpu: the model runs on a GPU.
        threads: CPU threads.
        cache_gib: memory of the key/value cache on a CPU.
        extra: further arguments of `vllm serve`, after all others.
    """

    model: Path
    served_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    max_model_len: int = 2048
    max_adapters: int = 16
    max_rank: int = 16
    tool_parser: str = "hermes"
    gpu: bool = False
    threads: int = os.cpu_count() or 1
    cache_gib: int = 1
    extra: Sequence[str] = ()


def find_vllm(named: Path | None, cache: Path) -> Path:
    """Returns the executable `vllm`: `named`, or that of the environment in the cache, or that on PATH.

    Raises VllmMissing.
    """
    cached = cache.expanduser() / FOLDER / "bin" / "vllm"
    found = shutil.which("vllm")
    path = named or (cached if cached.is_file() else Path(found) if found else None)
    if path is None or not os.access(path.expanduser(), os.X_OK):
        where = f"{path} is not an executable file" if path else f"there is none in {cached.parent} and none on PATH"
        raise VllmMissing(
            f"vLLM is not installed: {where}. `make vllm` installs it in its own environment; TENTALIS_VLLM "
            "names another `vllm` executable."
        )
    return path.expanduser().absolute()


def has_gpu() -> bool:
    """Returns True if the machine has a driver of NVIDIA."""
    return _DRIVER.exists()


def server_dtype() -> str:
    """Returns the precision in which vLLM serves by default: bfloat16 with a GPU, else float32."""
    return "bfloat16" if has_gpu() else "float32"


def default_context(model: Path) -> int:
    """Returns the model's longest context in tokens, but at most 2048."""
    config = json.loads((model / "config.json").read_text())
    return min(_LONGEST_DEFAULT, int(config.get("max_position_embeddings") or _LONGEST_DEFAULT))


def vllm_command(executable: Path, options: VllmOptions) -> list[str]:
    """Returns the command line of the server.

    The log-probs are those of the sampling distribution. A parameter that a request leaves out means the model's own
    distribution (`--generation-config vllm`), not a default of the model's folder.
    """
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", options.tool_parser) if options.tool_parser else ()
    return [
        *(str(executable), "serve", str(options.model)),
        *("--served-model-name", options.served_name),
        *("--host", options.host, "--port", str(options.port)),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_model_len)),
        *MENDING_FLAG.split(),
        *("--generation-config", "vllm"),
        *(
            "--enable-lora",
            "--max-lora-rank",
            str(next((rank for rank in _RANKS if rank >= options.max_rank), _RANKS[-1])),
        ),
        *("--max-loras", str(min(_MOST_SLOTS, options.max_adapters)), "--max-cpu-loras", str(options.max_adapters)),
        *tools,
        *(() if options.gpu else ("--enforce-eager",)),
        *options.extra,
    ]


def vllm_environment(options: VllmOptions, plugins: Path) -> dict[str, str]:
    """Returns the variables to add to the environment. `plugins`: the folder of `write_plugin`."""
    cpu = {
        "VLLM_CPU_KVCACHE_SPACE": str(options.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads would share a core with the other processes
        "OMP_NUM_THREADS": str(options.threads),
    }
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Nothing of our environment: vLLM's has other versions of the same packages.
        "PYTHONPATH": str(plugins),
    } | ({} if options.gpu else cpu)


def write_plugin(folder: Path) -> None:
    """Writes our plugin (plugin.py) into a folder, as an installed package whose entry point vLLM finds there."""
    shutil.copyfile(plugin.__file__, folder / f"{PLUGIN}.py")
    metadata = folder / f"{PLUGIN}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:install\n")
