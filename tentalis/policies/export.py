"""Exports a version of a policy for servers that do not load PEFT folders, or that cannot reach this system's store."""

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from schemas.records import PolicyUpdate
from tentalis.policies.replica import adapter_place, check_weights, weights_name
from tentalis.storage.file_cache import FileCache

PROVENANCE = "tentalis.json"


class ExportFormat(StrEnum):
    """gguf: a LoRA file for llama.cpp and Ollama. safetensors: the PEFT folder, for vLLM and others. merged: a whole
    model with the adapter in its weights. A version that is a whole model is copied by the last two."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    MERGED = "merged"


class ExportRefused(Exception):
    """A version cannot be exported. The message is for a person."""


@dataclass(frozen=True, slots=True)
class ExportedVersion:
    """The files of an export, with their sizes in bytes, and notes on their use."""

    folder: Path
    files: dict[str, int]
    usage: str


def export_version(
    update: PolicyUpdate, export_format: ExportFormat, target: Path, cache: FileCache, base: Path | None
) -> ExportedVersion:
    """Writes a version to the new folder `target`, which appears when it is whole. The adapter's sha256 is checked.

    `base`: the folder of the base model, which gguf and merged of an adapter need. Raises ExportRefused,
    AdapterRejected, StorageError, MissingExtra, ModelNotFound, OSError.
    """
    if target.exists():
        raise ExportRefused(f"{target} exists: name a folder that does not")
    if update.is_whole_model and export_format is ExportFormat.GGUF:
        raise ExportRefused(
            "it is a whole model, and gguf is for adapters: use --format merged, and convert that folder with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    if base is not None and not update.is_whole_model:
        _check_base(update, base)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as use:
            place = adapter_place(update.location)
            if place.folder is not None:
                check_weights(place.folder, update)
                adapter = place.folder
            else:
                adapter = use.enter_context(cache.opened(place, {weights_name(update): update.sha256}))
            usage = _write(update, export_format, adapter, work, base)
        provenance = {"version": update.name, "sha256": update.sha256, "run": update.run_id, "step": update.step}
        provenance |= {"base_model": update.base_model, "base_sha256": update.base_sha256}
        (work / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    return ExportedVersion(target, files, usage.format(folder=target))


def _write(update: PolicyUpdate, export_format: ExportFormat, adapter: Path, work: Path, base: Path | None) -> str:
    """Writes the folder and returns notes on its use."""
    if update.is_whole_model:
        shutil.copytree(adapter, work)
        return "vLLM: vllm serve {folder}"
    if export_format is ExportFormat.SAFETENSORS:
        shutil.copytree(adapter, work)
        options = f"--enable-lora --max-lora-rank {update.rank} --lora-modules {update.policy}={{folder}}"
        return f"vLLM: vllm serve BASE {options}"
    if base is None:
        raise ExportRefused(f"the format {export_format.value} needs the base model {update.base_model}")
    from tentalis.inference.gguf_adapter import write_gguf_adapter
    from tentalis.inference.lora import AdapterRefused
    from tentalis.inference.merged_model import write_merged_model

    file = f"{update.policy}-v{update.version}.gguf"
    try:
        if export_format is ExportFormat.MERGED:
            write_merged_model(adapter, base, work)
            return "vLLM: vllm serve {folder}"
        work.mkdir()
        write_gguf_adapter(adapter, base, work / file, update.name)
    except AdapterRefused as error:
        raise ExportRefused(str(error)) from error
    (work / "Modelfile").write_text(f"FROM ./base.gguf\nADAPTER ./{file}\n")
    return (
        f"llama.cpp: llama-server -m BASE.gguf --lora {{folder}}/{file}\n"
        "Ollama: write the base model in FROM of {folder}/Modelfile, then: "
        f"ollama create {update.policy} -f {{folder}}/Modelfile"
    )


def _check_base(update: PolicyUpdate, base: Path) -> None:
    """Raises ExportRefused if the folder holds other weights than the adapter was trained on."""
    from tentalis.inference.models import model_digest

    found = model_digest(base)
    if found != update.base_sha256:
        raise ExportRefused(
            f"{base} holds other weights (sha256 {found[:12]}) than {update.name} was trained on "
            f"({update.base_model}, {update.base_sha256[:12]}): name its base model with --base"
        )
