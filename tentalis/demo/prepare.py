"""Downloads the broker and the model before the stack starts, with a progress bar for each."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def prepare(console: "Console", policy_model: str | None, cache: Path, *, own_broker: bool) -> Path:
    """Fetches the broker's archives and the model if they are missing; returns the model's folder.

    Raises JarError or ModelNotFound; their messages say what to do.
    """
    from tentalis.inference.models import resolve_model
    from tentalis.local.jars import fetch_jars
    from tentalis.service.progress_bars import progress_bars

    with progress_bars(console) as report:
        if own_broker:
            fetch_jars(cache, lambda done, total, name: report("Apache Kafka", done, total))
        return resolve_model(policy_model, cache, report)
