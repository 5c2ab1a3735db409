"""Filters records by an expression of CEL, the Common Expression Language (https://cel.dev).

CEL has no side effects, no loops and regular expressions in linear time, so an expression always ends. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

NAMES = ("topic", "partition", "offset", "timestamp", "key", "headers", "type", "value", "error", "dlq", "tombstone")
"""The variables of an expression: the fields of a record as `tentalis consume -o json` prints it; null if missing."""

_VARIABLES = f"The variables are {', '.join(NAMES)}"

# The library's error for a function that CEL has and that takes no value of this type is that of a function that does
# not exist: "Undefined variable or function: 'size'".
_FUNCTIONS = (
    *("bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"),
    *("contains", "endsWith", "matches", "max", "min", "size", "startsWith"),
    *("getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getHours", "getMilliseconds"),
    *("getMinutes", "getMonth", "getSeconds"),
)


class BadExpression(Exception):
    """An expression that is no CEL, names an unknown variable or function, or is not true or false."""


class _Unevaluated(Exception):
    """The record has not what the expression needs."""


class RecordFilter:
    """A compiled expression.

    A record that lacks a field, or has another type in it than the expression needs, does not match. `unevaluated` is
    the number of such records, and `first_reason` the first reason.
    """

    def __init__(self, expression: str) -> None:
        """Compiles an expression and tries it, so that a name that does not exist is refused before the first record.
        Raises BadExpression."""
        import cel

        self.unevaluated = 0
        self.first_reason = ""
        self._expression = expression
        try:
            self._program = cel.compile(expression)
        except ValueError as error:
            raise BadExpression(f"not an expression of CEL: {_line(error)}") from error
        with suppress(_Unevaluated):
            found = self._result({})
            if found is not None:
                self._boolean(found)

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Returns True if the expression is true for a record. Raises BadExpression."""
        try:
            return self._boolean(self._result(record))
        except _Unevaluated as error:
            self.unevaluated += 1
            self.first_reason = self.first_reason or str(error)
            return False

    def _result(self, record: Mapping[str, Any]) -> Any:
        """Returns the value of the expression for a record. Raises BadExpression, _Unevaluated."""
        variables = {name: record.get(name) for name in NAMES} | {"tombstone": "tombstone" in record}
        try:
            return self._program.execute(variables)
        except RuntimeError as error:
            name = str(error).partition("'")[2].partition("'")[0]
            if name not in _FUNCTIONS:
                raise BadExpression(f"{self._expression}: {_line(error)} {_VARIABLES}") from error
            raise _Unevaluated(f"{name} does not take a value of this type") from error
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise _Unevaluated(f"{type(error).__name__}: {error}") from error

    def _boolean(self, found: object) -> bool:
        """Returns the value itself. Raises BadExpression if it is not true or false."""
        if not isinstance(found, bool):
            raise BadExpression(f"{self._expression} is {found!r}, not true or false: compare it with something")
        return found


def _line(error: Exception) -> str:
    """Returns the first line of the library's message; the others repeat the expression with a mark below it."""
    return str(error).partition("\n")[0]
