"""Refusals in the words of the bridge."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from schemas.problems import problems
from tentalis import rewards
from tentalis.gateway.failure import Refused


@contextmanager
def valid() -> Iterator[None]:
    """What cannot be a record is the caller's mistake. Raises Refused (422, 404)."""
    try:
        yield
    except ValidationError as error:
        raise Refused(422, problems(error, "body")) from None
    except rewards.UnknownVerifier as error:
        raise Refused(404, str(error)) from error
    except (rewards.RewardError, OverflowError) as error:
        raise Refused(422, str(error)) from error


def conflict(why: str) -> Refused:
    """Another body under an id that is taken."""
    return Refused(409, f"{why}: what is on the log stays as it is", "conflict_error")
