"""Bars for downloads and conversions that a command waits for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int | None], None]
"""`progress(what, done, total)`: the current activity and its progress in bytes or steps; total None if unknown."""


@contextmanager
def progress_bars(console: "Console") -> Iterator[Progress]:
    """Yields a callback that shows one bar per item; without a terminal, it prints one line per item."""
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
