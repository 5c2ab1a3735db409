"""Programs built from their Go modules: on Debian the packages are too old, or there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.docker.engine import NotAvailable

GO = (1, 24)


def require_go(purpose: str) -> None:
    """Raises NotAvailable without Go. `purpose`: why it is needed, and what to do instead."""
    if shutil.which("go") is None:
        raise NotAvailable(f"no `go`: install Go {GO[0]}.{GO[1]} or newer {purpose}")


def go(folder: Path, *arguments: str) -> str:
    """Returns the output of `go ARGUMENTS` in the folder of a module. Raises RuntimeError with what it said."""
    env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}
    done = subprocess.run(["go", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"go {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def write_module(folder: Path, required: dict[str, str]) -> Path:
    """Writes a module that requires others, by their versions; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["module tentalis.test/parts", f"go {GO[0]}.{GO[1]}.0"]
    lines += [f"require {name} {version}" for name, version in required.items()]
    (folder / "go.mod").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def build_program(module: Path, package: str, program: Path, flags: str = "") -> bool:
    """Builds a program unless it is there; returns True if it was built. `flags`: for the linker."""
    if program.exists():
        return False
    program.parent.mkdir(parents=True, exist_ok=True)
    go(module, "build", "-trimpath", "-ldflags", f"-s -w {flags}".strip(), "-o", str(program), package)
    return True
