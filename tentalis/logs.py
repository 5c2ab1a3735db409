"""How every process of ours logs: to stderr, one line a message, at the level that TENTALIS_LOG names."""

import logging
import os
import re
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_NUMBERS = re.compile(r"\d+")


class BadLevel(ValueError):
    """TENTALIS_LOG names no level."""


def configure(default: str = "INFO") -> None:
    """Sets up logging anew. Raises BadLevel."""
    level = os.environ.get("TENTALIS_LOG", default).upper()
    if level not in logging.getLevelNamesMapping():
        raise BadLevel(f"TENTALIS_LOG={level} is no level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level, stream=sys.stderr, format=FORMAT, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(Sparing(("aiokafka", "librdkafka")))
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request says nothing here


class Sparing(logging.Filter):
    """Lets a message of the loggers named through once in ten seconds, and says how many were left out since.

    While a broker is away, each client says so dozens of times a second: a long outage would fill the disk.
    """

    def __init__(self, prefixes: tuple[str, ...], interval: float = 10.0) -> None:
        super().__init__()
        self._prefixes = prefixes
        self._interval = interval
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._prefixes):
            return True
        kind = _kind(record)
        said, left_out = self._seen.get(kind, (-self._interval, 0))
        if record.created - said < self._interval:
            self._seen[kind] = (said, left_out + 1)
            return False
        self._seen[kind] = (record.created, 0)
        if left_out:
            record.msg = f"{record.msg} (and {left_out} times before)"
        return True


def _kind(record: logging.LogRecord) -> str:
    # librdkafka's messages all come with one format; they differ by the client's number and by times.
    return _NUMBERS.sub("", record.getMessage()) if record.name == "librdkafka" else str(record.msg)
