"""Hints from a function of the user: a text or None for each answer, with the conventions of reward functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from schemas.records import Result
from tentalis.rewards.functions.arguments import missing_columns
from tentalis.rewards.functions.scorer import FunctionData, FunctionScorer, FunctionSettings
from tentalis.rewards.verdict import data_of


class HintProvider(Protocol):
    """Gives the hint on an answer, if there is one."""

    def hint(self, result: Result) -> str | None:
        """Returns the hint. Raises FunctionError if the function failed on this answer."""
        ...


class HintFunction:
    """A function in a process of its own, as a reward function. `name` has the digest of its source.

    Raises BadFunction.
    """

    def __init__(self, settings: FunctionSettings) -> None:
        self._function = FunctionScorer(settings, Path(), returns="text")
        self.name = self._function.name

    def hint(self, result: Result) -> str | None:
        """See HintProvider."""
        (value,) = self._function.values(result.task, result)
        return value.text

    def missing(self, columns: Mapping[str, object]) -> list[str]:
        """Returns the names of the columns that the function needs and a row does not have."""
        (function,) = self._function.description.functions
        return missing_columns(function.signature, columns)

    def close(self) -> None:
        """Ends the process. The next call starts it again."""
        self._function.close()


class HintColumn:
    """A column of the prompts: its text is the hint on every answer to the prompt."""

    def __init__(self, column: str) -> None:
        self._column = column

    def hint(self, result: Result) -> str | None:
        """See HintProvider."""
        value = data_of(result.task, FunctionData).columns.get(self._column)
        return value if isinstance(value, str) else None
