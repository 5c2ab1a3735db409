"""`tentalis policy export`: a version as files for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.policy_version import PolicyVersion
from tentalis.cli.shared.settings import reached

if TYPE_CHECKING:
    from schemas.records import PolicyUpdate
    from tentalis.service.settings import Settings

FORMATS = ("gguf", "safetensors", "merged")


def export(
    version: PolicyVersion,
    export_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="gguf: LoRA for llama.cpp and Ollama; safetensors: PEFT folder; merged: whole model.",
            metavar="gguf|safetensors|merged",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder to write.")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Base model for gguf and merged: a folder, a name or a hub id. Default: the one of the training run.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes a version to a folder, for servers that this system does not load it into.

    The adapter's sha256 is checked first, and so is the base model's for gguf and merged.
    """
    from tentalis.policies.export import ExportFormat, ExportRefused, export_version
    from tentalis.policies.replica import AdapterRejected
    from tentalis.policies.view_reader import read_policies
    from tentalis.service.packages import require
    from tentalis.storage.places import adapter_cache

    if export_format not in FORMATS:
        raise typer.BadParameter(f"{export_format!r} is not one of {', '.join(FORMATS)}", param_hint="--format")
    wanted = ExportFormat(export_format)
    with reached(bootstrap) as settings:
        view = read_policies(settings)
        update = view.find(version)
        folder = None
        if wanted is not ExportFormat.SAFETENSORS and not update.is_whole_model:
            require(f"policy export --format {wanted.value}", "train")
            folder = _base(settings, update, base or view.base_model(update))
        try:
            done = export_version(update, wanted, to, adapter_cache(settings), folder)
        except (ExportRefused, AdapterRejected) as error:
            raise CommandError(f"{update.name} cannot be exported: {error}") from error
    if output is not OutputFormat.TABLE:
        print_data(output, {"version": update.name, "folder": str(done.folder), "files": done.files})
        return
    print_table(("file", "bytes"), list(done.files.items()))
    print_text(f"\n{done.usage}")


def _base(settings: Settings, update: PolicyUpdate, name: str) -> Path:
    """The folder of the base model. Raises CommandError, ModelDamaged."""
    from tentalis.cli.shared.policy_model import prepared_model
    from tentalis.inference.model_download import ModelNotFound

    try:
        return prepared_model(name, settings.cache)
    except ModelNotFound as error:
        raise CommandError(
            f"the base model of {update.name}, {name!r}, is not here: {error} Name it with --base"
        ) from error
