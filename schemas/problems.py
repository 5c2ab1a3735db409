"""Formats pydantic's validation errors as readable text. Pure."""

from collections.abc import Container, Sequence
from typing import Any

from pydantic import ValidationError

MOST_PROBLEMS = 5
"""Further problems are only counted."""


def problems(found: ValidationError | Sequence[Any], whole: str, unsaid: Container[str] = ()) -> str:
    """Formats a ValidationError, or its list of errors, as `place: problem; ...`, without the input values.

    Args:
        whole: the name of the data, for problems of the data as a whole.
        unsaid: parts of a place that are left out because the author of the data did not write them.
    """
    if isinstance(found, ValidationError):
        found = found.errors(include_url=False, include_context=False, include_input=False)
    told = [
        f"{'.'.join(str(part) for part in error['loc'] if part not in unsaid) or whole}: "
        f"{error['msg'].removeprefix('Value error, ')}"
        for error in found[:MOST_PROBLEMS]
    ]
    left = len(found) - len(told)
    return "; ".join([*told, f"and {left:,} more"] if left > 0 else told)
