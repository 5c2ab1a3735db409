"""The context in a dead letter's headers, whoever writes it; key and value bytes stay as they were."""

from datetime import UTC, datetime

PREFIX = "tentalis.dlq."
MESSAGE_BYTES = 1024


def app_version() -> str:
    """The version of this installation, for dead letters."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tentalis")
    except PackageNotFoundError:
        return "unknown"


def class_of(error: BaseException) -> str:
    """What dead letters call an error's class: with its module, without `builtins`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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
    """Where the record lay (timestamp in ms), who failed on it (`version` of the application), why, and when
    (`failed_at`, seconds since the epoch). ASCII, at most MESSAGE_BYTES each.
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
