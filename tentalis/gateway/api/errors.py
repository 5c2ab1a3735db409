"""Maps errors to the bridge's HTTP errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from schemas.problems import problems
from tentalis.gateway.http.errors import APIError
from tentalis.rewards.verdict import RewardError, UnknownVerifier


@contextmanager
def validation_as_api_errors() -> Iterator[None]:
    """Turns invalid records into errors of the caller. Raises APIError (422, 404)."""
    try:
        yield
    except ValidationError as error:
        raise APIError(422, problems(error, "body")) from None
    except UnknownVerifier as error:
        raise APIError(404, str(error)) from error
    except (RewardError, OverflowError) as error:
        raise APIError(422, str(error)) from error


def conflict_error(reason: str) -> APIError:
    """The error for another body under an id that is in use."""
    return APIError(409, f"{reason}: the record on the log is unchanged", "conflict_error")
