"""One application process under the fault schedule, and the cause if it ended by itself."""

import os
import re
import signal
import subprocess
from enum import StrEnum
from pathlib import Path

from tests.support.fork_server import ForkedProcess

NOBODY = "http://127.0.0.1:9"
"""The teacher's address, where no server is: the driver sends the hints that would need one."""
ENDED_FOR_A_REASON = 1
"""The exit code of all failures that a restart repairs (streams/runtime/worker.py)."""
NO_BROKER = 4
"""The exit code of a command that cannot reach a broker when it starts."""


class Cause(StrEnum):
    """The cause for which a worker ended by itself."""

    FENCED = "fenced"
    """Another worker has its instance name, or it was silent until the group reassigned its partitions."""
    GROUP_LOST = "group lost"
    """The coordinator rejected it or was unreachable."""
    WATCHDOG = "watchdog"
    """It made no progress although it had records to process."""
    OVERWRITTEN = "overwritten"
    """A predecessor that was frozen woke up and wrote to its changelog: a restart reads that back."""
    BROKER_AWAY = "broker away"
    """It could not reach the broker, or its writes were not confirmed."""
    CRASH = "crash"
    """Any other cause: no injected fault explains it."""


_LAST_WORDS = re.compile(r"^\S+ \S+ CRITICAL streams\..*$", re.MULTILINE)
_SAID = {
    Cause.FENCED: re.compile(r" ends: WorkerFenced\("),
    Cause.GROUP_LOST: re.compile(r" ends: GroupLost\("),
    Cause.OVERWRITTEN: re.compile(r" ends: WrittenByAnother\("),
    Cause.WATCHDOG: re.compile(r" has made no progress for "),
    Cause.BROKER_AWAY: re.compile(
        r" ends: \w+\(KafkaError\{code="
        r"(_MSG_TIMED_OUT|_TRANSPORT|_ALL_BROKERS_DOWN|_DESTROY_BROKER|_TIMED_OUT|_INCONSISTENT|_NOENT|REQUEST_TIMED_OUT"
        r"|NOT_LEADER_FOR_PARTITION|LEADER_NOT_AVAILABLE|FENCED_LEADER_EPOCH|UNKNOWN_LEADER_EPOCH|OFFSET_NOT_AVAILABLE),"
        r"| ends: ChangelogError\(.* is the broker up\?"
        r"| ends: (NoAnswer|KafkaConnectionError|NodeNotReadyError|KafkaTimeoutError|RequestTimedOutError)\("
    ),
}


def cause_of(code: int, log: str) -> tuple[Cause, str]:
    """The cause for which a process ended with this exit code (negative: by a signal) and this log, and the log line
    that tells it.

    Tracebacks are ignored, also before that line. The first failure of a worker counts, and its last CRITICAL line
    names it.
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
    """One application process with its log. `instance` is its name in the consumer group."""

    def __init__(self, bootstrap: str, folder: Path, instance: str, application: str) -> None:
        self.instance = instance
        self.log = folder / f"{instance}.{len(list(folder.glob(f'{instance}.*.log')))}.log"
        command = ["-m", "tentalis.cli", "serve", application, "--instance", instance]
        command += ["--server", NOBODY] if application == "hinting" else []
        # Partitions move between workers with and without state on disk, and back to databases left from before.
        command += ["--state", "memory" if instance.endswith("-0") else "rocksdb"]
        environment = {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = ForkedProcess(command, os.environ | environment, self.log)

    @property
    def owns_partitions(self) -> bool:
        return b"owns partitions" in self.log.read_bytes()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def cause(self) -> tuple[Cause, str]:
        """The cause for which it ended by itself, and the log line that tells it."""
        return cause_of(self.process.wait(0), self.log.read_text(errors="replace"))

    def end(self, how: signal.Signals) -> int:
        """Ends the process with a signal and waits; returns its exit code."""
        self.process.send_signal(how)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
