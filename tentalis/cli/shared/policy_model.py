"""The options of a served model, and the model that --policy-model names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PolicyModel = Annotated[
    str | None,
    typer.Option(
        "--policy-model",
        help="The model: smollm2, qwen2.5-coder-0.5b or qwen2.5-coder-1.5b, a folder, a GGUF file, or a hub id. "
        "Default: smollm2.",
        show_default=False,
    ),
]
ServedName = Annotated[
    str | None, typer.Option("--served-name", help="Name of the base model. Default: the name of its folder.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", min=1, help="Longest context, in tokens. Default: the model's, at most 2048."),
]


def prepared_model(policy_model: str | None, cache: Path) -> Path:
    """Returns the model's folder; a model that is fetched or converted first is shown with a bar on stderr.

    Raises ModelNotFound, ModelDamaged.
    """
    from rich.console import Console

    from tentalis.inference.models import resolve_model
    from tentalis.service.progress_bars import progress_bars

    with progress_bars(Console(stderr=True)) as report:
        return resolve_model(policy_model, cache, report)
