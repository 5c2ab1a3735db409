"""The sites of the drill, in the order in which they are played. Importing this module registers all faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.drill import (  # noqa: F401 - their faults are registered
    alerts,
    bad_records,
    groups,
    grown,
    judges,
    lost_topics,
    second_stack,
    settings,
    training,
)
from tests.drill.bench import Bench
from tests.drill.by_hand import ByHand
from tests.drill.logins import Logins
from tests.drill.shell import Shell
from tests.drill.stack import Stack


class Site(Protocol):
    """A place for faults: opened once, shared by its faults, verified and closed."""

    shell: Shell

    def open(self) -> None:
        """Starts what the site has."""

    def lost(self) -> list[str]:
        """The problems that the verifier finds, after all faults."""

    def close(self) -> None:
        """Ends all processes of the site."""


SITES: dict[str, Callable[[Path], Site]] = {
    "bench": Bench,
    "grown": Bench,
    "logins": Logins,
    "stack": Stack,
    "by-hand": ByHand,
}
