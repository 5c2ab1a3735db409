"""Errors of commands: messages for the user and exit codes. Imports nothing heavy."""

from __future__ import annotations

from tentalis.service import error_messages
from tentalis.service.exit_codes import ExitCode


class CommandError(Exception):
    """An error message for the user, with the exit code of the command."""

    def __init__(self, message: str, code: int = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.code = code


def explain(error: Exception) -> tuple[str, int]:
    """Returns the message for the user and the exit code of an error."""
    return (str(error), error.code) if isinstance(error, CommandError) else error_messages.explain(error)
