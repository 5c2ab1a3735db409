"""A fault, and the registry of all faults.

The function of a fault is a generator. It breaks something and yields what the operator then sees. The drill compares
that with `sees` and runs the transcript of the same name on the fault's page. Then the generator continues: it raises
AssertionError if things do not work again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sight:
    """The symptoms of a fault: an exit code, or the state of a process in `tentalis status`, and words."""

    code: int | None = None
    state: str | None = None
    says: str = ""

    def __str__(self) -> str:
        seen = f"exit {self.code}" if self.state is None else self.state
        return f"{seen}: {self.says}"


Play = Callable[[Any], Iterator[Sight]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A named fault.

    Attributes:
        name: also the name of its transcript.
        page: the page in docs/operations that has the transcript.
        site: the family: faults of one site share it, in the order of their definition.
        sees: the expected exit code or state, and a part of the message.
    """

    name: str
    page: str
    site: str
    sees: Sight
    play: Play


FAULTS: dict[str, Fault] = {}


def fault(
    site: str, page: str, *, says: str, code: int | None = None, state: str | None = None
) -> Callable[[Play], Play]:
    """Registers a fault under the name of its function, with hyphens."""

    def register(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        assert name not in FAULTS, f"two faults are named {name}"
        assert (code is None) != (state is None), f"{name}: expects an exit code or a state"
        FAULTS[name] = Fault(name, page, site, Sight(code, state, says), play)
        return play

    return register
