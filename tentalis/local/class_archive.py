"""The archive of the classes of the embedded broker: a JVM maps it instead of loading each class from the jars.

It is made once for a Java runtime and its jars, and lies beside these in the cache (68 MB). Without it a broker takes
twice the CPU time to start.

`kafka_classes.txt` names the classes of a broker. To make it for another version of Kafka: start a broker whose
environment has `JDK_JAVA_OPTIONS=-XX:DumpLoadedClassList=FILE`, create the topics, write in a transaction and read as a
group, stop it, and keep the names: `grep -v '^[@#]' FILE | cut -d' ' -f1 | sort -u`. The JVM passes over a name that
does not exist.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

CLASSES = Path(__file__).with_name("kafka_classes.txt")
_SCRATCH = "archive-"


def class_archive(java: Path, jars: Sequence[Path], flags: Sequence[str]) -> Path | None:
    """Returns the archive for these Java archives, and makes it if it is missing.

    Returns None while another process makes it, and, with a warning, if it cannot be made: a broker starts without it.

    Args:
        java: the program of the Java runtime.
        jars: the class path, at least one file.
        flags: the options with which the broker runs.
    """
    folder = jars[0].parent
    try:
        path = folder / f"classes-{_digest(java, jars, flags)}.jsa"
        if path.is_file():
            return path
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if not path.is_file():
                _make(path, java, jars, flags)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()[-1000:]
        log.warning("the broker starts slowly, because no archive of its classes can be made in %s: %s", folder, reason)
        return None
    return path


def _make(path: Path, java: Path, jars: Sequence[Path], flags: Sequence[str]) -> None:
    log.info("making an archive of the broker's classes, which later starts use: %s", path)
    for left_over in path.parent.glob(f"{_SCRATCH}*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch, path.name)
        command = [str(java), "-Xshare:dump", "-Xlog:disable", "-Xlog:all=error:stderr", *flags]
        command += [f"-XX:SharedClassListFile={CLASSES}", f"-XX:SharedArchiveFile={made}", "-cp", class_path(jars)]
        subprocess.run(
            command,
            cwd=scratch,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        made.replace(path)


def class_path(jars: Sequence[Path]) -> str:
    """Returns the class path of these Java archives."""
    return os.pathsep.join(map(str, jars))


def _digest(java: Path, jars: Sequence[Path], flags: Sequence[str]) -> str:
    """Names what the JVM compares with an archive before it uses it. Raises OSError."""
    found = [(java.parent.parent / "release").read_text(encoding="utf-8"), *flags]
    found += [f"{jar} {status.st_size} {status.st_mtime_ns}" for jar in jars for status in (jar.stat(),)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
