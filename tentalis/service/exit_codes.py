"""The exit codes of all Tentalis commands and processes."""

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """An exit code. `summary` is its entry in `tentalis --help`.

    Each docstring names the errors that end with the code. Errors become codes in `tentalis/service/error_messages.py`
    (commands, ranks of the trainer), `streams/runtime/exit_status.py` (stream applications) and `trainer/run/loop.py`
    (trainer).
    """

    summary: str

    def __new__(cls, value: int, summary: str) -> Self:
        """Makes a member of its number and summary."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.summary = summary
        return member

    OK = 0, "ok"
    """The work is done, or a service was stopped in order."""
    ERROR = 1, "error"
    """An error without its own code, a failed check, a crash, or a stream application that made no progress."""
    USAGE = 2, "usage"
    """Wrong options, environment variables or configuration files (CommandError, BadVariable, BadSecurity,
    ConfigError)."""
    DRIFT = 3, "drift or incompatible"
    """Topics are missing (NoSuchTopic), differ from schemas/topics.yaml (TopicsWrong, Impossible) or got more
    partitions (PartitionsChanged), or a schema is incompatible (SchemaRefused)."""
    UNREACHABLE = 4, "unreachable"
    """The broker, the schema registry or the object store does not answer (Unreachable, NoBroker, SchemasUnavailable,
    StoreUnreachable)."""
    NEEDS_OPERATOR = 5, "needs an operator"
    """Too many records failed: the process stops instead of dead-lettering all (`TooManyDead`, tentalis/dlq/limits.py).
    Or the object store is full (StoreFull).

    The local supervisor does not restart it until an operator asks (`tentalis restart`), and `tentalis up` ends with
    this code when it is stopped. Chart and compose hold it (tentalis/service/hold.py).
    """
    FORBIDDEN = 6, "forbidden"
    """The broker's ACLs or the object store deny an operation (Forbidden, StoreDenied)."""
    PERMANENT = 7, "permanent: do not restart"
    """Settings, files or records that a restart does not repair (`Unmendable`, tentalis/service/lifecycle.py;
    NoSuchBucket).

    The local supervisor does not restart it until an operator asks (`tentalis restart`). Chart and compose hold it
    (tentalis/service/hold.py).
    """
    INTERRUPTED = 130, "interrupted"
    """Ended by Ctrl-C before the work was done: 128 + SIGINT, as in a shell."""
    STOPPED = 143, "stopped"
    """Ended by SIGTERM before the work was done, so the work must not count as done: 128 + SIGTERM, as in a shell."""
