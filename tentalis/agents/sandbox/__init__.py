"""Walls around actions that a model chose. In: a command and limits. Out: its output, exit code and why it ended.

Begin reading with `wall` (the interface and the limits) and `choose` (which wall this machine has).
"""

from tentalis.agents.sandbox.abandoned import kill_abandoned
from tentalis.agents.sandbox.choose import NO_WALL, WALLS, WallMissing, choose_wall, wall_or_reason
from tentalis.agents.sandbox.wall import CommandEnd, CommandOutput, Limits, RunningCommand, SandboxFault, Wall

__all__ = [
    "NO_WALL",
    "WALLS",
    "CommandEnd",
    "CommandOutput",
    "Limits",
    "RunningCommand",
    "SandboxFault",
    "Wall",
    "WallMissing",
    "choose_wall",
    "kill_abandoned",
    "wall_or_reason",
]
