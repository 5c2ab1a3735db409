"""The folders of episodes: one each, below the system's temporary folder, named by the process that holds it.

A killed process leaves its folders, and may leave processes of its commands; the next one that starts on this machine
removes them.
"""

import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path

import psutil

from tentalis.agents.sandbox import kill_abandoned

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
    make_accessible(folder)
    done = subprocess.run(["rm", "-rf", "--", folder], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 and folder.exists():
        log.warning("%s was not removed: %s", folder, done.stderr[:1000].strip())


def make_accessible(folder: Path) -> None:
    """Gives this user the rights to all files and folders in a folder back, which an episode may have taken away. Links
    are not followed."""
    command = ["chmod", "-R", "u+rwX", "--", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 and folder.exists():
        log.warning("the rights in %s were not changed: %s", folder, done.stderr[:1000].strip())


def remove_abandoned() -> list[Path]:
    """Ends what processes that are gone left running, and removes their folders. Returns the folders."""
    kill_abandoned()
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        holder = _NAME.match(folder.name)
        if holder is None or not _is_abandoned(folder, int(holder.group(1))):
            continue
        log.info("the folder of an episode was left by a process that is gone: %s", folder)
        remove_folder(folder)
        found.append(folder)
    return found


def _is_abandoned(folder: Path, pid: int) -> bool:
    """Returns True if a folder of this user was made by a process that is gone. A process that started after the last
    change of the folder is another one with the same id: a worker has it again when its container restarts."""
    try:
        found = folder.stat()
        return found.st_uid == os.getuid() and psutil.Process(pid).create_time() > found.st_ctime
    except psutil.NoSuchProcess:
        return True
    except (FileNotFoundError, psutil.AccessDenied):  # its episode ended just now; the process is another user's
        return False
