"""Facts about a task that scoring and hinting must derive alike, since their halves meet in the join. Pure."""

from schemas.records import Opens, Result, Source, Terms


def opened_at(result: Result, appended: int) -> int:
    """Returns the time (ms) at which the task of a half on this result opened. `appended`: append time of the half's
    feedback."""
    return appended if result.task.terms.opens is Opens.FIRST_FEEDBACK else result.opened_at


def named(terms: Terms, source: Source) -> bool:
    """Returns true if any half in the terms waits for this source."""
    return source in (terms.rl, terms.opd)
