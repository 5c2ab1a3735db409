"""The demo: a scenario played on the local stack, shown while it runs and summed up when it is over."""

from tentalis.config import Settings
from tentalis.demo.runs import Configured, unchanged


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
    as_json: bool = False,
) -> int:
    """Plays `scenario` until `steps` policy versions are trained, and returns the exit code.

    `changes` are settings of the trainer as a person wrote them, which `configured` puts in. An unfinished run of the
    same kind in this state directory goes on. `keep` leaves the stack running after the summary, until Ctrl-C. With
    `as_json` stdout is one JSON object and nothing else; all the rest goes to stderr.
    """
    from tentalis.demo.play import DemoOptions, play

    return play(DemoOptions(scenario, steps, policy_model, keep, as_json, ranks, changes), settings, configured)


__all__ = ["run"]
