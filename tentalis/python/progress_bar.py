"""The progress of a run as a bar of tqdm, in a terminal or a notebook."""

import sys
from types import TracebackType
from typing import Any, Self

from tentalis.demo.view import Snapshot, served_step

_STARTED = ("ready", "running", "done")


class TrainingBar:
    """A bar of steps, with the newest reward and the sampling speed. It is also the file of a console, so that
    remarks are printed above it. If `shown` is False, only the remarks are printed."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, now: Snapshot) -> None:
        """Shows the progress of a run."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=now.steps, unit="step", dynamic_ncols=True)
        self._bar.set_description_str(now.stats.run_id, refresh=False)
        self._bar.set_postfix_str(state_of(now), refresh=False)
        self._bar.n = min(now.steps, served_step(now.stats))
        self._bar.refresh()

    def write(self, text: str) -> int:
        """Prints a text on standard error, above the bar if there is one."""
        if not self._shown:
            return sys.stderr.write(text)
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stderr, end="")
        return len(text)

    def flush(self) -> None:
        """Does nothing: every text is printed at once."""


def state_of(now: Snapshot) -> str:
    """Returns the newest reward and the speed; before the first answer, the processes that are starting."""
    scores = now.stats.scores()
    if scores:
        return f"reward v{scores[-1].version} {scores[-1].mean:.2f}, {now.stats.tokens_per_second():.0f} tok/s"
    starting = [name for name, status in now.processes.items() if status["state"] not in _STARTED]
    return f"starting {', '.join(starting)}" if starting else "sampling"
