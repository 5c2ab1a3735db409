"""The transitions of an episode that was played without a worker."""

from collections.abc import Sequence
from dataclasses import replace

from tentalis.agents.environments import RecordsEnding, Transition


def with_ending(transitions: Sequence[Transition], scored: RecordsEnding) -> list[Transition]:
    """The transitions of an episode that was scored, the last one with the records of its ending."""
    *first, last = transitions
    return [*first, replace(last, tool_calls=(*last.tool_calls, *scored.ending_calls()))]
