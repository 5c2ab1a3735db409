"""Parses `--set SETTING=VALUE`, for `tentalis demo` and `tentalis replay`."""

from __future__ import annotations

from collections.abc import Sequence

from tentalis.cli.shared.errors import CommandError
from tentalis.service.exit_codes import ExitCode


def parse_changes(changes: Sequence[str]) -> dict[str, str]:
    """Returns the values of `--set` by their settings. Raises CommandError."""
    for change in changes:
        if not change.partition("=")[0].strip() or "=" not in change:
            raise CommandError(f"--set {change}: expected SETTING=VALUE, such as optimizer.lr=1e-4", ExitCode.USAGE)
    return {name.strip(): value for name, _, value in (change.partition("=") for change in changes)}
