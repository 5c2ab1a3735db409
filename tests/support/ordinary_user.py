"""Runs this Python as an ordinary user: some walls confine no commands of root.

The interpreter, the packages or the checkout may be in a folder that only root can enter, such as /root. So the command
runs in a mount namespace of its own, in which such a folder holds these three and nothing else. Nothing is copied, and
the machine stays as it is.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT

USER = 61_001
"""The id of a user and of a group that no system has: processes of other users have other ids."""
HOME, TEMPORARY = "home", "tmp"
"""The folders in that of `home`."""
_NEEDED = ("unshare", "setpriv", "mount")


def why_not() -> str | None:
    """Returns the reason why this process cannot run something as an ordinary user, or None."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} of util-linux is missing"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"root cannot make a mount namespace here: {tried.stderr.strip()}"


@contextmanager
def home() -> Iterator[Path]:
    """A folder with two of the ordinary user: its home, and one for temporary files."""
    with tempfile.TemporaryDirectory(prefix="tentalis-user-") as folder:
        Path(folder).chmod(0o755)
        for name in (HOME, TEMPORARY):
            each = Path(folder, name)
            each.mkdir(mode=0o700)
            os.chown(each, USER, USER)
        yield Path(folder)


def run_as_user(arguments: Sequence[str], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs this Python with arguments, in the checkout, with a folder of `home`. Its stderr is that of this process."""
    words = shlex.join(
        ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", sys.executable, *arguments],
    )
    variables = {
        "HOME": str(folder / HOME),
        "TMPDIR": str(folder / TEMPORARY),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    script = "\n".join(["set -e", *_opened(), f"cd {shlex.quote(str(ROOT))}", f"exec {words}"])
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _opened() -> list[str]:
    """Returns shell commands that let everybody reach what Python needs."""
    needed: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(Path(each).resolve() for each in (sys.base_prefix, sys.prefix, ROOT)):
        closed = [each for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
        if closed:
            needed.setdefault(closed[0], []).append(path)
    lines = []
    for closed, paths in needed.items():
        lines.append("stage=$(mktemp -d); mount -t tmpfs -o mode=755 tentalis $stage")
        for number, path in enumerate(paths):
            lines.append(f"mkdir $stage/{number}; mount --bind {shlex.quote(str(path))} $stage/{number}")
        lines.append(f"mount -t tmpfs -o mode=755 tentalis {shlex.quote(str(closed))}")
        for number, path in enumerate(paths):
            name = shlex.quote(str(path))
            lines.append(f"mkdir -p {name}; mount --bind $stage/{number} {name}")
        lines.append("umount -R $stage; rmdir $stage")
    return lines
