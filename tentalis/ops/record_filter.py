"""Filters records by an expression of CEL, the Common Expression Language (https://cel.dev).

CEL has no side effects, no loops and regular expressions in linear time, so an expression always ends. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("topic", "partition", "offset", "timestamp", "key", "headers", "type", "value", "error", "dlq", "tombstone")
"""The variables of an expression: the fields of a record as `tentalis consume -o json` prints it; null if missing."""


class BadExpression(Exception):
    """An expression that is no CEL, names an unknown variable or function, or is not true or false."""


class RecordFilter:
    """A compiled expression.

    A record that lacks a field, or has another type in it than the expression needs, does not match. `unevaluated` is
    the number of such records, and `first_reason` the first reason.
    """

    def __init__(self, expression: str) -> None:
        """Compiles an expression. Raises BadExpression."""
        import cel

        self.unevaluated = 0
        self.first_reason = ""
        self._expression = expression
        try:
            self._program = cel.compile(expression)
        except ValueError as error:
            raise BadExpression(f"not an expression of CEL: {_line(error)}") from error

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Returns True if the expression is true for a record. Raises BadExpression."""
        variables = {name: record.get(name) for name in NAMES} | {"tombstone": "tombstone" in record}
        try:
            found = self._program.execute(variables)
        except RuntimeError as error:
            raise BadExpression(f"{self._expression}: {_line(error)} The variables are {', '.join(NAMES)}") from error
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self.unevaluated += 1
            self.first_reason = self.first_reason or f"{type(error).__name__}: {error}"
            return False
        if not isinstance(found, bool):
            raise BadExpression(f"{self._expression} is {found!r}, not true or false: compare it with something")
        return found


def _line(error: Exception) -> str:
    """Returns the first line of the library's message; the others repeat the expression with a mark below it."""
    return str(error).partition("\n")[0]
