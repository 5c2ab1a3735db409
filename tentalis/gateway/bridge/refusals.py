"""Refusals in the words of the bridge."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from tentalis import rewards
from tentalis.gateway.failure import Refused


@contextmanager
def valid() -> Iterator[None]:
    """What cannot be a record is the caller's mistake. Raises Refused (422, 404)."""
    try:
        yield
    except ValidationError as error:
        raise Refused(
            422, problems(error.errors(include_url=False, include_context=False, include_input=False))
        ) from None
    except rewards.UnknownVerifier as error:
        raise Refused(404, str(error)) from error
    except (rewards.RewardError, OverflowError) as error:
        raise Refused(422, str(error)) from error


def problems(errors: Sequence[Any]) -> str:
    """What is wrong with a body, in words."""
    told = [f"{'.'.join(str(part) for part in e['loc'] if part != 'body') or 'body'}: {e['msg']}" for e in errors[:5]]
    left = len(errors) - len(told)
    return "; ".join(told) + (f"; and {left} more" if left > 0 else "")


def conflict(why: str) -> Refused:
    """Another body under an id that is taken."""
    return Refused(409, f"{why}: what is on the log stays as it is", "conflict_error")
