"""Chooses the wall of this machine, or refuses."""

import importlib.util
import sys

from tentalis.agents.sandbox.no_wall import NoWall
from tentalis.agents.sandbox.wall import SandboxFault, Wall
from tentalis.service.lifecycle import Unmendable
from tentalis.service.packages import how_to_install

NO_WALL = NoWall.name


class WallMissing(Unmendable):
    """This machine has no wall for the actions of a model, and the operator did not allow to run them without one."""


def choose_wall(*, allow_unsandboxed: bool = False) -> Wall:
    """Returns the strongest wall of this machine. `allow_unsandboxed`: without one, actions run unconfined.

    Raises WallMissing.
    """
    found = _sandlock()
    if not isinstance(found, str):
        return found
    if allow_unsandboxed:
        return NoWall()
    raise WallMissing(
        f"actions of a model run only behind a wall, and this machine has none: {found}. Correct that, or accept with "
        "--allow-unsandboxed that a model runs any command as this user"
    )


def _sandlock() -> Wall | str:
    """Returns the wall of sandlock, or the reason why there is none."""
    if not sys.platform.startswith("linux"):
        return f"sandlock needs Linux, and this is {sys.platform}"
    if importlib.util.find_spec("sandlock") is None:
        return f"sandlock is not installed ({how_to_install('environments')})"
    import sandlock

    abi, least = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if abi < least:
        return f"sandlock needs a kernel with Landlock ABI {least} (Linux 6.12), and this one has {abi}"
    from tentalis.agents.sandbox.sandlock_wall import SandlockWall

    try:
        return SandlockWall()
    except SandboxFault as error:
        return str(error)
