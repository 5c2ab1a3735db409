"""Bounds the log files of the local stack while what writes to them lives.

The processes write to their files themselves, so that neither the supervisor's death nor its being busy costs a line or
holds them up. What they hold open is appended to and cannot be exchanged under them: a file that is full is copied to
`NAME.log.1` and emptied. A line that is written between the two is lost; a file that cannot be copied is left as it is.
"""

import os
import shutil
from pathlib import Path

LIMIT = 10 * 2**20


def turn_over(folder: Path) -> tuple[list[Path], str]:
    """Turns over every `*.log` above LIMIT bytes. Returns those, and what kept others from it, in words."""
    turned: list[Path] = []
    troubles: list[str] = []
    for file in sorted(folder.glob("*.log")):
        try:
            if file.stat().st_size > LIMIT:
                _turn_over(file)
                turned.append(file)
        except OSError as error:  # no room for the copy: it can hardly grow either
            troubles.append(f"cannot turn over {file}: {error}")
    return turned, "; ".join(troubles)


def _turn_over(file: Path) -> None:
    copy = file.with_name(f"{file.name}.tmp")
    try:
        shutil.copyfile(file, copy)
        copy.replace(file.with_name(f"{file.name}.1"))
    finally:
        copy.unlink(missing_ok=True)
    os.truncate(file, 0)
