"""The exit code of a worker that ended, and the log line that gives the reason."""

import logging

from streams.runtime.processor import DamagedState
from streams.runtime.sink import RecordNotDelivered
from streams.runtime.startup import TopicsWrong
from tentalis.dlq.limits import TooManyDead
from tentalis.kafka.acls import Operation, Resource
from tentalis.kafka.errors import Forbidden, forbidden, refused
from tentalis.kafka.identity import PartitionsChanged
from tentalis.service.exit_codes import ExitCode
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

_SPEAKING = frozenset({"streams", "tentalis", "schemas", "aiokafka"})
"""Packages whose error messages need no traceback."""


def foreseen(error: BaseException) -> bool:
    """True if an error comes from one of these packages, so that a traceback adds nothing to its message."""
    return type(error).__module__.partition(".")[0] in _SPEAKING


def ended(app_id: str, failure: BaseException | None, settings: Settings, changelog: str | None) -> int:
    """The exit code of a worker that failed, or that was stopped if `failure` is None; logs the reason."""
    if failure is None:
        log.info("%s stopped", app_id)
        return ExitCode.OK
    if isinstance(failure, TooManyDead):
        log.critical("%s stops: %s", app_id, failure)
        return ExitCode.NEEDS_OPERATOR
    refusal = forbidden_of(failure, settings)
    if refusal is not None:
        log.critical("%s ends: %s. Nothing unconfirmed was committed", app_id, refusal)
        return ExitCode.FORBIDDEN
    if isinstance(failure, Unmendable):
        log.critical("%s ends: %s. Nothing unconfirmed was committed", app_id, failure)
        return ExitCode.PERMANENT
    if isinstance(failure, TopicsWrong | PartitionsChanged):
        log.critical("%s ends: %s. Nothing unconfirmed was committed", app_id, failure)
        return ExitCode.DRIFT
    if isinstance(failure, DamagedState):
        log.critical(
            "%s ends: %s. Nothing unconfirmed was committed, and the next start rebuilds this state from %s. If that "
            "fails in the same way, the changelog itself is damaged: delete it, create it again with `tentalis topics "
            "apply --accept-loss`, reset the consumer group to the beginning of its topics, and start once "
            "with --accept-loss",
            *(app_id, failure, changelog),
        )
        return ExitCode.ERROR
    log.critical("%s ends: %r. Nothing unconfirmed was committed", app_id, failure)
    return ExitCode.ERROR


def forbidden_of(failure: BaseException, settings: Settings) -> Forbidden | None:
    """The Forbidden error for a client error that the broker's ACLs caused, else None. Unwraps Faust's errors."""
    from aiokafka import errors

    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, Forbidden):
            return seen
        if isinstance(seen, RecordNotDelivered):
            error, topic = seen.args
            meaning = refused(settings, error, Operation.WRITE, topic)
            return meaning if isinstance(meaning, Forbidden) else None
        name = str(seen.args[0]) if seen.args else "(not named)"
        if isinstance(seen, errors.TopicAuthorizationFailedError):
            # aiokafka does not name the operation.
            return Forbidden(f"{_no(settings)} an operation on topic {name}. {_WHAT_NEXT}")
        if isinstance(seen, errors.GroupAuthorizationFailedError):
            return forbidden(settings, [(Operation.READ, Resource.GROUP, name)])
        if isinstance(seen, errors.ClusterAuthorizationFailedError):
            return Forbidden(
                f"{_no(settings)} to write (Write on any topic is enough for its producer id). {_WHAT_NEXT}"
            )
        seen = seen.__cause__ or seen.__context__
    return None


_WHAT_NEXT = "`tentalis topics acls` prints what each role needs"


def _no(settings: Settings) -> str:
    return f"the broker's ACLs do not allow {settings.security.principal}"
