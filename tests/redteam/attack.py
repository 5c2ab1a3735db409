"""An attack: code that a model could write, and what counts as its success."""

from collections.abc import Callable
from dataclasses import dataclass

from tentalis.agents.sandbox import CommandOutput, Limits, Wall
from tests.redteam.place import Place

LIMITS = Limits(
    time_s=20.0,
    cpu_s=10,
    memory_mb=256,
    processes=8,
    open_files=64,
    file_mb=4,
    disk_mb=48,
    files=2000,
    output_bytes=20_000,
)
"""Limits of a command of the red team."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The remains of an attack: the wall, the place, the output of the command and the seconds that it took."""

    wall: Wall
    place: Place
    output: CommandOutput
    seconds: float


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack on a wall.

    `success`: what the attacker wants. `code`: a Python program in the attacker's folder, with the names of `Place.filled`.
    It prints `won` if it got it. `outside`: looks for the success from outside of the wall. `harms`: what the attack would
    do to a machine without a wall; empty: it is run there too.
    """

    kind: str
    name: str
    success: str
    code: str
    outside: Callable[[Trial], bool] = lambda trial: False
    limits: Limits = LIMITS
    harms: str = ""

    @property
    def id(self) -> str:
        """Kind and name."""
        return f"{self.kind}: {self.name}"
