"""Why a worker ended: its exit code, and what people are told."""

import logging

from streams.processor import StateError
from streams.sink import NotDelivered
from tentalis.acls import Operation, Resource
from tentalis.config import Settings
from tentalis.dlq.limits import EXIT_TOO_MANY_DEAD, TooManyDead
from tentalis.refusal import Forbidden, forbidden, refused
from tentalis.service import UNMENDABLE, Unmendable

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_DRIFT = 3
EXIT_UNREACHABLE = 4
EXIT_FORBIDDEN = 6

_SPEAKING = frozenset({"streams", "tentalis", "schemas", "aiokafka"})
"""Packages whose errors say themselves all there is to know."""


def foreseen(error: BaseException) -> bool:
    """Whether an error was raised in so many words: where in the program it showed says nothing more."""
    return type(error).__module__.partition(".")[0] in _SPEAKING


def ended(app_id: str, failure: BaseException | None, settings: Settings, changelog: str | None) -> int:
    """The exit code of a worker that failed, or was stopped if it did not; a line in the log says why."""
    if failure is None:
        log.info("%s stopped", app_id)
        return EXIT_OK
    if isinstance(failure, TooManyDead):
        log.critical("%s stops: %s", app_id, failure)
        return EXIT_TOO_MANY_DEAD
    refusal = forbidden_of(failure, settings)
    if refusal is not None:
        log.critical("%s ends: %s. Nothing unconfirmed was committed", app_id, refusal)
        return EXIT_FORBIDDEN
    if isinstance(failure, Unmendable):
        log.critical("%s ends: %s. Nothing unconfirmed was committed", app_id, failure)
        return UNMENDABLE
    if isinstance(failure, StateError):
        log.critical(
            "%s ends: %s. Nothing unconfirmed was committed, and the next start makes this state anew from %s. If that "
            "ends like this too, the changelog itself is damaged: delete it and reset the group to the beginning of "
            "its topics, to fold them again",
            *(app_id, failure, changelog),
        )
        return EXIT_CRASHED
    log.critical("%s ends: %r. Nothing unconfirmed was committed", app_id, failure)
    return EXIT_CRASHED


def forbidden_of(failure: BaseException, settings: Settings) -> Forbidden | None:
    """What an error of a client means, if it is the broker's ACLs: Faust may have wrapped it."""
    from aiokafka import errors

    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, NotDelivered):
            error, topic = seen.args
            meaning = refused(settings, error, Operation.WRITE, topic)
            return meaning if isinstance(meaning, Forbidden) else None
        name = str(seen.args[0]) if seen.args else "(not named)"
        if isinstance(seen, errors.TopicAuthorizationFailedError):
            # Which operation, aiokafka does not say.
            return Forbidden(f"{_no(settings)} what it tries on topic {name}. {_WHAT_NEXT}")
        if isinstance(seen, errors.GroupAuthorizationFailedError):
            return forbidden(settings, [(Operation.READ, Resource.GROUP, name)])
        if isinstance(seen, errors.ClusterAuthorizationFailedError):
            return Forbidden(
                f"{_no(settings)} to write (Write on any topic would do for its producer id). {_WHAT_NEXT}"
            )
        seen = seen.__cause__ or seen.__context__
    return None


_WHAT_NEXT = "`tentalis topics acls` prints what each role needs"


def _no(settings: Settings) -> str:
    return f"the broker's ACLs do not allow {settings.security.principal}"
