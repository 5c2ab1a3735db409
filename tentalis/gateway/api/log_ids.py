"""Translates between ids given by callers and ids on the log. Pure.

A user's id `t1` is on the log as `<user>:t1`, so the ids of different users' tasks, feedback and turns never collide.
Callers whose key belongs to no user give ids as they are on the log.
"""

from urllib.parse import quote

from tentalis.gateway.http.keys import Caller


def log_id(caller: Caller, given: str) -> str:
    """The id on the log for a caller's id `given`; an id that already has the caller's prefix is unchanged."""
    prefix = _prefix(caller)
    return given if given.startswith(prefix) else prefix + given


def public_id(caller: Caller, record_id: str) -> str:
    """The caller's own form of an id on the log."""
    return record_id.removeprefix(_prefix(caller))


def _prefix(caller: Caller) -> str:
    # A quoted user has no colon, so no prefix begins with another user's prefix.
    return "" if caller.user is None else f"{quote(caller.user, safe='')}:"
