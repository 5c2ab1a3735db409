"""One process of an application under the rota, and why it ended if nobody told it to."""

import os
import re
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

NOBODY = "http://127.0.0.1:9"
"""The teacher's address: the driver makes the hints that would need one."""
ENDED_FOR_A_REASON = 1
"""The exit code of every end that a start makes good again (streams/app.py)."""
NO_BROKER = 4
"""That of a command that found no broker to begin with."""


class Cause(StrEnum):
    """Why a worker ended by itself."""

    FENCED = "fenced"
    """Another worker runs under its name, or it was silent until the group gave its partitions away."""
    GROUP_LOST = "group lost"
    """The coordinator refused it, or was away."""
    WATCHDOG = "watchdog"
    """Nothing moved, although there was something to do."""
    OVERWRITTEN = "overwritten"
    """A predecessor that was frozen woke up and wrote to its changelog: it has to read that back."""
    BROKER_AWAY = "broker away"
    """It could not reach the broker, or was not confirmed what it wrote."""
    CRASH = "crash"
    """Anything else: nothing that is done to it explains it."""


_LAST_WORDS = re.compile(r"^\S+ \S+ CRITICAL streams\..*$", re.MULTILINE)
_SAID = {
    Cause.FENCED: re.compile(r" ends: Fenced\("),
    Cause.GROUP_LOST: re.compile(r" ends: GroupLost\("),
    Cause.OVERWRITTEN: re.compile(r" ends: WrittenByAnother\("),
    Cause.WATCHDOG: re.compile(r" has made no progress for "),
    Cause.BROKER_AWAY: re.compile(
        r" ends: \w+\(KafkaError\{code=(_MSG_TIMED_OUT|_TRANSPORT|_ALL_BROKERS_DOWN|_TIMED_OUT|REQUEST_TIMED_OUT),"
        r"| ends: ChangelogError\(.* is the broker up\?"
        r"| ends: (NoAnswer|KafkaConnectionError|NodeNotReadyError|KafkaTimeoutError|RequestTimedOutError)\("
    ),
}


def cause_of(code: int, log: str) -> tuple[Cause, str]:
    """Why a process ended with this exit code (negative: by a signal) and this log; and its last words.

    A traceback explains nothing, and neither does one in front of a reason: of a worker that could not go on the first
    failure counts, and it is what the last words name.
    """
    lines, tail = _LAST_WORDS.findall(log), "\n".join(log.splitlines()[-15:])
    if code == NO_BROKER:
        return Cause.BROKER_AWAY, tail
    if code != ENDED_FOR_A_REASON or not lines:
        return Cause.CRASH, tail
    for cause, said in _SAID.items():
        if said.search(lines[-1]):
            return cause, lines[-1]
    return Cause.CRASH, lines[-1]


class Worker:
    """One process of an application, with a log of its own. `instance` is its name in the consumer group."""

    def __init__(self, bootstrap: str, folder: Path, instance: str, application: str) -> None:
        self.instance = instance
        self.log = folder / f"{instance}.{len(list(folder.glob(f'{instance}.*.log')))}.log"
        command = [sys.executable, "-m", "tentalis.cli", "serve", application, "--instance", instance]
        command += ["--server", NOBODY] if application == "hinting" else []
        # Partitions move between workers with and without state on disk, and back to databases that were left behind.
        command += ["--state", "memory" if instance.endswith("-0") else "rocksdb"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ
                | {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(folder), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    @property
    def owns_partitions(self) -> bool:
        return b"owns partitions" in self.log.read_bytes()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def cause(self) -> tuple[Cause, str]:
        """Why it ended by itself, and its last words."""
        return cause_of(self.process.wait(0), self.log.read_text(errors="replace"))

    def end(self, how: signal.Signals) -> int:
        """Sends a signal that ends it, and waits; its exit code."""
        self.process.send_signal(how)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
