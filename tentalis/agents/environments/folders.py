"""The folders of episodes: one each, below the system's temporary folder, named by the process that holds it.

A killed process leaves its folders, and programs of its episodes that took themselves out of its session. The next
process that starts on this machine ends these programs and removes the folders.
"""

import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

PREFIX = "tentalis-episode-"
_NAME = re.compile(rf"{PREFIX}(\d+)-")


def new_folder() -> Path:
    """Makes the folder of an episode, for this user alone. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def remove_folder(folder: Path) -> None:
    """Removes a folder, also if an episode took its own rights to it away. Links are removed, not followed.

    By programs of the system, because an episode can nest folders deeper than a path or Python's stack is long.
    """
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        done = subprocess.run([*command, "--", folder], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 and folder.exists():
            log.warning("%s was not removed: %s", folder, done.stderr[:1000].strip())


def remove_abandoned() -> list[Path]:
    """Removes the folders of processes that are gone, and ends their programs. Returns the folders."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        holder = _NAME.match(folder.name)
        if holder is None or psutil.pid_exists(int(holder.group(1))) or folder.stat().st_uid != os.getuid():
            continue
        log.info("the folder of an episode was left by a process that is gone: %s", folder)
        _end_programs(folder)
        remove_folder(folder)
        found.append(folder)
    return found


def _end_programs(folder: Path) -> None:
    """Ends the programs of an episode: those of this user whose home is in its folder."""
    for process in psutil.process_iter():
        try:
            if Path(process.environ().get("HOME", "/")).is_relative_to(folder):
                process.kill()
                log.info("a program of that episode was ended: %d", process.pid)
        except psutil.Error:
            continue  # it has ended, or belongs to another user
