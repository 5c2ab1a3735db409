"""The times of the last steps by phase, for `tentalis status --watch`. Imports nothing heavy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tentalis.cli.shared.errors import explain
from tentalis.cli.shared.output import first_line, print_table, print_text

if TYPE_CHECKING:
    from tentalis.demo.recent_steps import StepTimes
    from tentalis.service.settings import Settings

# Seconds from a failure to the next attempt, and for which the end of the command waits for the thread.
RETRY_S, CLOSE_S = 3.0, 2.0


@dataclass(frozen=True, slots=True)
class StepTimesAnswer:
    """The times of the last steps of each run; None while they are not known, with the reason."""

    rows: tuple[StepTimes, ...] | None = None
    unknown: str = "the log is being read"

    def fields(self) -> dict[str, Any]:
        """Returns the fields for programs."""
        if self.rows is None:
            return {"step_times": None, "step_times_unknown": self.unknown}
        return {"step_times": [asdict(row) for row in self.rows], "step_times_unknown": None}

    def show(self) -> None:
        """Prints a table, with `-` for what is not known."""
        from tentalis.demo.recent_steps import MOST_MS
        from tentalis.demo.stats import PHASES

        if not self.rows:
            idle = f"no run began or planned a step in the last {MOST_MS // 3_600_000} hours"
            print_text(f"\ntime per step: - ({idle if self.rows is not None else self.unknown})")
            return
        print_text()
        print_table(
            ("run", "step", "median of", *PHASES),
            [
                (row.run, row.step, f"{row.steps} steps", *(_seconds(row.seconds_by_phase[name]) for name in PHASES))
                for row in self.rows
            ],
        )


class StepTimesWatch:
    """Reads the times on a thread: what shows them never waits for the broker.

    Args:
        settings: returns the settings of the Kafka to read; asked again after each failure.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self.answer = StepTimesAnswer()
        self._thread = threading.Thread(target=self._run, name="step-times", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, or leaves it to the end of the process if the broker does not answer."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - shown with the processes
                self.answer = StepTimesAnswer(unknown=first_line(explain(error)[0]))
                self._stop.wait(RETRY_S)

    def _read(self) -> None:
        from tentalis.demo.step_reader import read_step_times

        with closing(read_step_times(self._settings())) as found:
            for rows in found:
                if rows is not None:
                    self.answer = StepTimesAnswer(tuple(rows))
                elif self.answer.rows is None:  # else the times before are shown while the log is read anew
                    self.answer = StepTimesAnswer()
                if self._stop.is_set():
                    return


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"
