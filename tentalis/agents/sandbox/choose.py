"""Chooses the wall of this machine, or refuses."""

import importlib.util
import sys
from collections.abc import Callable, Mapping

from tentalis.agents.sandbox.no_wall import NoWall
from tentalis.agents.sandbox.wall import SandboxFault, Wall
from tentalis.service.lifecycle import Unmendable
from tentalis.service.packages import how_to_install

NO_WALL = NoWall.name


class WallMissing(Unmendable):
    """This machine has no wall for the actions of a model, and the operator did not allow to run them without one."""


def choose_wall(*, allow_unsandboxed: bool = False) -> Wall:
    """Returns the first wall of WALLS that this machine has. `allow_unsandboxed`: without one, actions run unconfined.

    Raises WallMissing.
    """
    missing = []
    for name in WALLS:
        found = wall_or_reason(name)
        if not isinstance(found, str):
            return found
        missing.append(f"{name}: {found}")
    if allow_unsandboxed:
        return NoWall()
    raise WallMissing(
        f"actions of a model run only behind a wall, and this machine has none. {'; '.join(missing)}. Correct one of "
        "these, or accept with --allow-unsandboxed that a model runs any command as this user"
    )


def wall_or_reason(name: str) -> Wall | str:
    """Returns a wall of WALLS by its name, or the reason why this machine does not have it."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    try:
        return WALLS[name]()
    except SandboxFault as error:
        return str(error)


def _sandlock() -> Wall:
    if importlib.util.find_spec("sandlock") is None:
        raise SandboxFault(f"sandlock is not installed ({how_to_install('environments')})")
    import sandlock

    abi, least = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if abi < least:
        raise SandboxFault(f"sandlock needs a kernel with Landlock ABI {least} (Linux 6.12), and this one has {abi}")
    from tentalis.agents.sandbox.sandlock_wall import SandlockWall

    return SandlockWall()


def _bubblewrap() -> Wall:
    from tentalis.agents.sandbox.bubblewrap_wall import BubblewrapWall

    return BubblewrapWall()


WALLS: Mapping[str, Callable[[], Wall]] = {"sandlock": _sandlock, "bubblewrap": _bubblewrap}
"""Makers of the walls, the preferred one first. Each raises SandboxFault if this machine does not have it."""
