"""The context in a dead letter's headers, the same for all writers; key and value bytes stay unchanged."""

from datetime import UTC, datetime

PREFIX = "tentalis.dlq."
SKIPPED = "skip"
"""The stage of a letter that an operator wrote with `tentalis groups skip`."""
MESSAGE_BYTES = 1024


def class_of(error: BaseException) -> str:
    """The name of an error's class in dead letters: short, so that it survives a move of the code."""
    return type(error).__qualname__


def context_headers(
    *,
    topic: str,
    partition: int,
    offset: int,
    timestamp: int,
    group: str,
    error_class: str,
    error: str,
    stage: str,
    attempts: int,
    version: str,
    failed_at: float,
) -> tuple[tuple[str, bytes], ...]:
    """Headers with the record's position (timestamp in ms), the failing application (and its `version`), the error, and
    the time of the failure (`failed_at`, seconds since the epoch). ASCII, at most MESSAGE_BYTES each.
    """
    context = {
        "original-topic": topic,
        "original-partition": str(partition),
        "original-offset": str(offset),
        "original-timestamp": str(timestamp),
        "consumer-group": group,
        "error-class": error_class,
        "error-message": error,
        "error-stage": stage,
        "attempts": str(attempts),
        "app-version": version,
        "failed-at": datetime.fromtimestamp(failed_at, UTC).isoformat(timespec="milliseconds"),
    }
    return tuple(
        (PREFIX + name, text.encode("ascii", "backslashreplace")[:MESSAGE_BYTES]) for name, text in context.items()
    )
