"""The attacks that are known to succeed behind a wall of this machine, each with the reason why that is accepted.

An attack that is not here and succeeds is a new hole. One that is here and no longer succeeds is to be removed from here,
unless its kind depends on the speed of the machine.
"""

from collections.abc import Mapping

TIMED = frozenset({"disk", "fork bombs", "memory", "output"})
"""Kinds whose results depend on the speed and the load of the machine."""
_STATUS = "Landlock has no rule for the status of files: names and sizes are seen, no content"
KNOWN: Mapping[str, Mapping[str, str]] = {
    "sandlock": {
        "reads: existence of a process": _STATUS,
        "reads: size and time of a file": _STATUS,
        "fork bombs: zombie storm": "on most runs: sandlock does not count ended processes. They go with their command",
    },
    "bubblewrap": {},
}
"""Reasons by the name of the wall, without its version, and the id of the attack."""


def is_expected(wall: str, attack: str, *, succeeded: bool) -> bool:
    """Returns True if the result of an attack is a known one."""
    listed = attack in known(wall)
    return succeeded is listed or (listed and attack.partition(":")[0] in TIMED)


def known(wall: str) -> Mapping[str, str]:
    """Returns the known successes behind a wall, by its name or name/version."""
    return KNOWN.get(wall.partition("/")[0], {})
