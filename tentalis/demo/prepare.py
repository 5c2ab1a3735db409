"""What must be on the machine before the stack starts, with a progress bar on each long step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int | None], None]


def prepare(console: "Console", policy_model: str | None, cache: Path, *, own_broker: bool) -> Path:
    """Fetches the broker's archives and the model where they are missing; returns the model's folder.

    Raises JarError or ModelNotFound, which say what to do.
    """
    from tentalis.inference.models import resolve_model
    from tentalis.local.jars import fetch_jars

    with _bars(console) as report:
        if own_broker:
            fetch_jars(cache, lambda done, total, name: report("Apache Kafka", done, total))
        return resolve_model(policy_model, cache, report)


@contextmanager
def _bars(console: "Console") -> Iterator[Progress]:
    """One bar per thing that is reported; where there is no terminal, one line as each begins."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"{what} ...")
            progress.update(bars[what], completed=done, total=total)

        yield report
