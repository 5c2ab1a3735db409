"""The demo: plays a scenario on the local stack, shows its progress and writes a report.

In: scenario, steps, model. Out: a run on the log, a summary on stdout, an HTML report. Begin reading in `play.py`.
"""

from collections.abc import Callable
from typing import Any

from tentalis.demo.runs import Configured, unchanged
from tentalis.service.settings import Settings


def run(
    settings: Settings,
    *,
    scenario: str = "assistant",
    steps: int = 15,
    policy_model: str | None = None,
    keep: bool = False,
    ranks: int = 1,
    changes: tuple[str, ...] = (),
    configured: Configured = unchanged,
    emit: Callable[[Any], None] | None = None,
) -> int:
    """Plays `scenario` until `steps` policy versions are trained, and returns the exit code.

    `changes` are trainer settings as the user wrote them; `configured` applies them. Continues an unfinished run of the
    same kind in this state directory. `keep` leaves the stack running after the summary, until Ctrl-C. `emit`
    receives the summary for programs, instead of the printed one; everything else goes to stderr.
    """
    from tentalis.demo.play import DemoOptions, play

    return play(DemoOptions(scenario, steps, policy_model, keep, emit, ranks, changes), settings, configured)


__all__ = ["run"]
