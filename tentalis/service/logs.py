"""Logging of every process: to stderr, one line per message, at the level in TENTALIS_LOG.

A process of a local stack also follows the file that TENTALIS_LOG_LEVEL_FILE names: `tentalis log-level` writes the
level there, and it holds immediately and after a restart. A file, and not a signal or a request: it reaches every rank
of a trainer while the process is busy, and needs no port.
"""

import logging
import re
import sys
import threading
from pathlib import Path

from tentalis.service import variables

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FOLLOW_S = 1.0
_NUMBERS = re.compile(r"\d+")


def configure(default: str = "INFO") -> None:
    """Sets up logging and replaces an earlier setup. Raises BadVariable."""
    level = variables.LOG.read() or default
    logging.basicConfig(level=level, stream=sys.stderr, format=FORMAT, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimitFilter(("aiokafka",)))
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request is noise
    if file := variables.LOG_LEVEL_FILE.read():
        _followed(file).begin(level)


class LevelFollower:
    """Sets the level of the process's log to the one in a file, or to the level at the start if there is none."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at_start = self._now = "INFO"
        self._thread = threading.Thread(target=self._run, name="log-level", daemon=True)

    def begin(self, level: str) -> None:
        """Begins to follow; `level` is the one that was set at the start."""
        self._at_start = self._now = level
        self.look()
        if not self._thread.is_alive():
            self._thread.start()

    def look(self) -> None:
        """Reads the file and sets the level."""
        try:
            level = self._file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            level = self._at_start
        if level != self._now and (level in LEVELS or level == self._at_start):
            self._now = level
            logging.getLogger().setLevel(level)
            logging.getLogger(__name__).warning("the log level is now %s", level)

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_FOLLOW_S):
            self.look()


_followers: dict[Path, LevelFollower] = {}


def _followed(file: Path) -> LevelFollower:
    return _followers.setdefault(file, LevelFollower(file))


def client_logger() -> logging.Logger:
    """The logger of all librdkafka clients. It is rate-limited itself, whatever handlers a command installs."""
    found = logging.getLogger("librdkafka")
    if not any(isinstance(each, RateLimitFilter) for each in found.filters):
        found.addFilter(RateLimitFilter((found.name,)))
    return found


class RateLimitFilter(logging.Filter):
    """Lets each message of the named loggers through once in ten seconds, with the number of those left out since.

    While a broker is unreachable, each client logs it dozens of times a second: a long outage would fill the disk.
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
    # All librdkafka messages share one format string; they differ in the client's number and in times.
    return _NUMBERS.sub("", record.getMessage()) if record.name == "librdkafka" else str(record.msg)
