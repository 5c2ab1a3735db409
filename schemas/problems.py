"""What pydantic found wrong with data, in words. Pure."""

from collections.abc import Container, Sequence
from typing import Any

from pydantic import ValidationError

MOST_PROBLEMS = 5
"""More are only counted."""


def problems(found: ValidationError | Sequence[Any], whole: str, unsaid: Container[str] = ()) -> str:
    """`place: what is wrong; ...`, of a ValidationError or the list of one; what was given is not repeated.

    Args:
        whole: the name of the data, for what is wrong with all of it.
        unsaid: parts of a place that its author did not write.
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
