"""Ids that callers give, and those on the log. Pure.

What one user calls `t1` is on the log as `<user>:t1`: no two users' tasks, feedback or turns have the same id, whatever
they call them. Callers whose key is nobody's in particular name what is on the log itself.
"""

from urllib.parse import quote

from tentalis.gateway.keys import Caller


def on_log(caller: Caller, given: str) -> str:
    """The id on the log of what a caller calls `given`; one that is on the log as the caller's own stays as it is."""
    own = _own(caller)
    return given if given.startswith(own) else own + given


def shown(caller: Caller, name: str) -> str:
    """What a caller calls an id on the log."""
    return name.removeprefix(_own(caller))


def _own(caller: Caller) -> str:
    # A quoted user has no colon, so no user's ids begin as another's.
    return "" if caller.user is None else f"{quote(caller.user, safe='')}:"
