"""Watches the disk of a running stack: names a shortage, and keeps the logs bounded."""

from __future__ import annotations

import logging
from pathlib import Path

from tentalis.local import logfiles
from tentalis.local.disk import FULL, space

log = logging.getLogger(__name__)

_EVERY = 1.0


class DiskWatch:
    """`shortage` is the message about a full disk, or None. `folder`: the state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shortage: str | None = None
        self._looked = float("-inf")
        self._log_trouble = ""

    def look(self, now: float) -> list[Path]:
        """Looks at the disk if it is time. Returns the logs that were turned over."""
        if now - self._looked < _EVERY:
            return []
        self._looked = now
        try:
            shortage = space(self._folder).shortage(FULL)
        except OSError as error:
            shortage = f"{self._folder} cannot be used: {error}"
        if (shortage is None) != (self.shortage is None):
            if shortage is None:
                log.warning("%s has free space again: work continues", self._folder)
            else:
                log.error("%s: ended processes are not restarted until there is space", shortage)
        self.shortage = shortage
        turned, trouble = logfiles.turn_over(self._folder / "logs")
        if trouble and trouble != self._log_trouble:
            log.warning("%s", trouble)
        self._log_trouble = trouble
        return turned
