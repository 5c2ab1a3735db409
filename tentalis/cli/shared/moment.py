"""Points in time that an option names."""

from __future__ import annotations

from tentalis.cli.shared.errors import CommandError
from tentalis.service.exit_codes import ExitCode
from tentalis.text.timestamps import now_ms, parse_moment


def moment_of(option: str, text: str, now: int | None = None) -> int:
    """Returns the moment that the value of an option means, in ms since the epoch. Ages count from `now`, by default
    the current time. Raises CommandError, which names the option.

    >>> moment_of("--since", "1h", now=3_600_001)
    1
    """
    try:
        return parse_moment(text, now_ms() if now is None else now)
    except ValueError as error:
        raise CommandError(f"{option}: {error}", ExitCode.USAGE) from error
