"""Sends mutated records through the running applications: none may crash, every record is processed or a dead letter.

All stream applications run as processes on an embedded broker, with a fake model server. Mutated records
(`fuzzing.py`) are sent to all their input topics; some of them are bombs: small on the wire, large if decoded. Then
every record is accounted for by its topic, partition and offset.

    make fuzz [N=100000] [SEED=1]

Applications stop when too many records fail, and nearly all of these do: TENTALIS_DEAD_RUN and TENTALIS_DEAD_RATIO lift
the limits for this run. The last line on stdout is one JSON object. Its `reasons` list the failures, and the exit code
is 1 if there are any: records that are neither valid nor dead, dead letters whose bytes differ from the record, two
dead letters of one record, dead letters of valid records, memory growth. An application that crashes or stalls ends the
run with that error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.place import RecordPlace
from schemas.topics import dlq
from tentalis.dlq.actions import raw_of
from tentalis.dlq.records import RawRecord
from tentalis.kafka import topology
from tentalis.kafka.config import producer_config
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.offsets import committed_offsets
from tentalis.service.settings import Settings
from tests.chaos.account import account, reasons
from tests.chaos.fault_schedule import say
from tests.support.fork_server import ForkedProcess
from tests.support.fuzzing import INPUTS, Fuzzed, fuzzed
from tests.support.kafka_fixture import ensure_topics, eventually, new_broker
from tests.support.model_server import hinters_file, model_server

READERS = {each.name: each.consumes for each in topology.streams()}
WARM_UP = 0.2
"""Share of the records after which memory is measured first: caches and batches have reached their size by then."""
LIFTED = {"TENTALIS_DEAD_RUN": str(10**9), "TENTALIS_DEAD_RATIO": "1"}


class Fuzz:
    """The application processes, and the records sent to them by place."""

    def __init__(self, settings: Settings, folder: Path, server: str) -> None:
        self._settings = settings
        self._producer = Producer(producer_config(settings))
        self._folder = folder
        self._server = server
        self.sent: dict[RecordPlace, Fuzzed] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in READERS:
            command = ["-m", "tentalis.cli", "serve", name, "--instance", name]
            command += ["--server", self._server] if name in ("hinting", "experience") else []
            command += ["--hinters", str(hinters_file(self._folder, self._server))] if name == "experience" else []
            surroundings = {
                "TENTALIS_BOOTSTRAP": self._settings.require_bootstrap(),
                "TENTALIS_HOME": str(self._folder),
            }
            environment = os.environ | LIFTED | surroundings | {"OMP_NUM_THREADS": "1"}
            self.processes[name] = ForkedProcess(command, environment, self._folder / f"{name}.log")

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def send(self, seed: int, count: int) -> None:
        """Sends mutated records and waits for their confirmation. Raises KafkaException if one is not confirmed."""
        failures: list[KafkaError] = []

        def sender(record: Fuzzed) -> Any:
            def delivered(error: KafkaError | None, message: Message) -> None:
                if error is not None:
                    failures.append(error)
                else:
                    self.sent[RecordPlace(record.topic, record.partition, int(message.offset()))] = record

            return delivered

        for record in fuzzed(seed, count):
            while True:
                try:
                    self._producer.produce(
                        record.topic,
                        record.value,
                        record.key,
                        partition=record.partition,
                        headers=list(record.headers),
                        on_delivery=sender(record),
                    )
                except BufferError:
                    self._producer.poll(0.1)
                else:
                    self._producer.poll(0)
                    break
        self._producer.flush(60)
        if failures or len(self.sent) < count:
            raise KafkaException(failures[0] if failures else KafkaError(KafkaError._TIMED_OUT))

    def processed(self) -> bool:
        """True if every application has committed past all sent records. Raises RuntimeError if one has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")
        ends: dict[tuple[str, int], int] = {}
        for place in self.sent:
            where = place.topic, place.partition
            ends[where] = max(ends.get(where, 0), place.offset + 1)
        for name, names in READERS.items():
            try:
                done = committed_offsets(self._settings, f"tentalis-{name}", names)
            except KafkaException as error:
                if error.args[0].retriable():
                    return False  # the coordinator is still loading
                raise
            if any(done.get(where, 0) < end for where, end in ends.items() if where[0] in names):
                return False
        return True

    def memory(self) -> dict[str, float]:
        """Resident megabytes of each application."""
        return {name: psutil.Process(each.pid).memory_info().rss / 2**20 for name, each in self.processes.items()}

    def account(self) -> dict[str, Any]:
        """The account of all sent records."""
        return account(self.sent, self._read(map(dlq, INPUTS)), self._read)

    def _read(self, names: Iterable[str]) -> Iterator[RawRecord]:
        return (raw_of(message) for topic in names for message in messages_to_end(self._settings, topic))


def run(count: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs the experiment and returns the report. Raises RuntimeError if an application ended, AssertionError if one
    stalled."""
    broker = new_broker(folder / "kafka")
    with ExitStack() as stack:
        stack.callback(broker.stop)
        broker.start()
        broker.wait_ready()
        settings = Settings(bootstrap=broker.bootstrap)

        ensure_topics(settings)
        fuzz = Fuzz(settings, folder, stack.enter_context(model_server()))
        stack.callback(fuzz.stop)
        fuzz.start()
        began = time.monotonic()
        first = int(count * WARM_UP)
        fuzz.send(seed, first)
        eventually(fuzz.processed, seconds, message="the records of the warm-up are not all processed")
        before = fuzz.memory()
        say(f"{first} records in {time.monotonic() - began:.0f} s; resident: {_rounded(before)}")
        fuzz.send(seed + 1, count - first)
        eventually(fuzz.processed, seconds, message="not all records are processed")
        after = fuzz.memory()
        report = fuzz.account()
        grown = {name: after[name] - before[name] for name in after}
        return report | {
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
            "resident_mb": _rounded(after),
            "grown_mb": _rounded(grown),
            "reasons": reasons(report, grown),
        }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of each of the two parts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tentalis-fuzz-") as folder:
        report = run(options.n, options.seed, Path(folder), options.seconds)
    print(json.dumps(report))
    return 1 if report["reasons"] else 0


if __name__ == "__main__":
    sys.exit(main())
