"""A small real application for the tests of the worker: counts records per key and repeats each on an output topic.

`python -m tests.support.counting_app --bootstrap B --app A --topic T ...` runs it as a worker process. What a
record's value begins with decides what becomes of it; see `CountingProcessor.process`."""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from streams.runtime.processor import (
    Dead,
    Effects,
    LogRecord,
    OutputRecord,
    Retryable,
    applied_offset,
    payload_of,
    stamped,
)
from streams.runtime.worker import StreamSettings, run
from tentalis.service.settings import DeadLetterThresholds


class CountingProcessor:
    """State per key: the number of records counted. With a table, a record at or below the applied offset is known and
    not counted again."""

    def __init__(
        self,
        app_id: str,
        topic: str,
        *,
        table: str | None = "state",
        gate: Path | None = None,
        ticking: bool = False,
        echo: bool = True,
        delay: float = 0.0,
    ) -> None:
        self.app_id = app_id
        self.topics = (topic,)
        self.table = table
        self._gate = gate
        self._ticking = ticking
        self._echo = echo
        self._delay = delay
        self._counts: dict[int, dict[str, tuple[int, int]]] = {}

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        self._counts[partition] = {
            key: (int(payload_of(value)), applied_offset(value)) for key, value in entries.items()
        }

    def revoke(self, partition: int) -> None:
        del self._counts[partition]

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        effects = Effects()
        counts = self._counts[partition]
        changed: dict[str, bytes | None] = {}
        for record in records:
            assert (record.topic, record.partition) == (self.topics[0], partition)
            kind = record.value.split(b":")[0]
            if self._delay:
                await asyncio.sleep(self._delay)
            if kind == b"bad" or record.tombstone or record.key is None:
                effects.dead.append(Dead(record, "decode", "no number in it", "ValueError"))
                continue
            if kind == b"raise":
                raise RuntimeError("the processor does not like this record")
            if kind == b"wait" and self._gate is not None and not self._gate.exists():
                raise Retryable("the gate is closed")
            if kind == b"big":
                effects.outputs.append(OutputRecord(f"{self.topics[0]}.out", record.key, bytes(17 * 2**20)))
                continue
            count, applied = counts.get(record.key, (0, -1))
            if self.table is not None and record.offset <= applied:
                continue
            if kind == b"delete":
                counts.pop(record.key, None)
                changed[record.key] = None
                continue
            counts[record.key] = (count + 1, record.offset)
            changed[record.key] = stamped(record.offset, str(count + 1).encode())
            if self._echo:
                effects.outputs.append(OutputRecord(f"{self.topics[0]}.out", record.key, record.value))
        if self.table is not None:
            effects.changes = [list(changed.items())]
        return effects

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        if not self._ticking:
            return ()
        return [OutputRecord(f"{self.topics[0]}.ticks", "tick", str(p).encode(), partition=p) for p in partitions]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--app", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--state", choices=("memory", "rocksdb"), default="memory")
    parser.add_argument("--stateless", action="store_true")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--ticking", action="store_true")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--instance")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--session-timeout", type=float, default=10.0)
    parser.add_argument("--record-limit", type=int, default=16 * 2**20)
    parser.add_argument("--dead-run", type=int, default=100)
    parser.add_argument("--stall-limit", type=float, default=120.0)
    parser.add_argument("--commit-interval", type=float, default=0.2)
    parser.add_argument("--without", help="a guard of tests.support.unguarded")
    parser.add_argument("--fault", help="a fault of tests.support.unguarded")
    options = parser.parse_args(arguments)
    if options.without or options.fault:
        from tests.support.unguarded import FAULTS, GUARDS

        for table, name in ((GUARDS, options.without), (FAULTS, options.fault)):
            if name:
                table[name]()
    processor = CountingProcessor(
        options.app,
        options.topic,
        table=None if options.stateless else "state",
        gate=options.gate,
        ticking=options.ticking,
        echo=not options.silent,
        delay=options.delay,
    )
    settings = StreamSettings(
        options.bootstrap,
        options.state_dir,
        options.state,
        metrics_port=options.metrics_port,
        instance=options.instance,
        max_batch_records=options.batch,
        session_timeout=options.session_timeout,
        heartbeat_interval=min(3.0, options.session_timeout / 4),
        record_limit=options.record_limit,
        dead_letters=DeadLetterThresholds(run=options.dead_run),
        stall_limit=options.stall_limit,
        commit_interval=options.commit_interval,
    )
    return run(processor, settings)


if __name__ == "__main__":
    sys.exit(main())
