"""Shared by the tests of the join: a halves log made by hand, and workers whose flushes can be cut and delayed."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.ids import derived_id
from schemas.records import (
    Forget,
    Hint,
    HintKind,
    LogprobsMode,
    Open,
    Outcome,
    PolicySpan,
    Record,
    Rollout,
    Sample,
    Score,
    Source,
    Status,
    TaskHead,
    Terms,
    Tick,
)
from schemas.tensors import float32_bytes, int32_bytes, uint8_bytes
from schemas.wire.codec import Codec
from streams.apps.join.core import JoinLimits, JoinPartition
from streams.apps.join.emit import HalvesPartition
from streams.apps.join.processor import JoinProcessor
from streams.runtime.processor import Effects, LogRecord
from streams.runtime.rocksdb_store import Age, DiskStore
from streams.runtime.state import ChangelogFold, Entry, as_entries

CODEC = Codec()
PARTITION = 3
START = 1_000_000
LIMITS = JoinLimits(marker_ttl_ms=5_000, max_samples=16, forget_ttl_ms=9_000)


def head(task_id: str = "t1", n: int = 1, **terms: Any) -> TaskHead:
    """A task of n samples whose reward answers to the result and whose hint answers to the user."""
    wanted = {"rl": Source.RESULT, "opd": Source.USER, "deadline_ms": 1000, "opd_window_ms": 100} | terms
    return TaskHead(
        task_id=task_id,
        policy="assistant",
        environment="chat",
        n_samples=n,
        terms=Terms(**wanted),
        run_id="run",
        session_id=f"session-{task_id}",
        user_id=f"user-{task_id}",
    )


def sample(task: TaskHead, index: int = 0, result: str = "r1", *, status: Status = Status.OK, n: int = 4) -> Sample:
    """Prompt of one token, response of n - 1 tokens that depend on the result."""
    result_id = f"{task.task_id}-{index}-{result}"
    tokens = [7] + [sum(result_id.encode()) % 1000 + i for i in range(1, n)]
    return Sample(
        head=task,
        sample_index=index,
        result_id=result_id,
        response_digest=f"digest of {result_id}",
        worker_id="worker",
        status=status,
        token_ids=int32_bytes(tokens),
        loss_mask=uint8_bytes([0] + [1] * (n - 1)),
        sampler_logprobs=float32_bytes([0.0] + [-0.5] * (n - 1)),
        logprobs_mode=LogprobsMode.PROCESSED,
        policy_spans=(PolicySpan(start=1, policy="assistant@v1"),),
    )


def score(
    of: Sample,
    reward: float | None = 1.0,
    *,
    at: int = START,
    source: Source = Source.RESULT,
    id: str = "",
    task_at: int | None = None,
) -> Score:
    name = id or derived_id("score", of.result_id, source.value)
    components = {} if reward is None else {"plain": reward}
    return Score(
        score_id=name,
        event_time=at,
        opened_at=at,
        sample=of,
        source=source,
        reward=reward,
        components=components,
        scorer="rule/1",
        task_at=task_at,
    )


def hint(
    of: Sample,
    kind: HintKind = HintKind.ACCEPTED,
    *,
    at: int = START,
    source: Source = Source.USER,
    id: str = "",
    task_at: int | None = None,
) -> Hint:
    accepted = kind is HintKind.ACCEPTED
    return Hint(
        hint_id=id or derived_id("hint", of.result_id, source.value),
        event_time=at,
        opened_at=at,
        sample=of if accepted else of.without_tokens(),
        source=source,
        kind=kind,
        hints=("Be brief.",) if accepted else (),
        teacher_policy="base" if accepted else None,
        teacher_logprobs=float32_bytes([-0.25] * (len(of.token_ids) // 4)) if accepted else None,
        hinter="rule/1",
        task_at=task_at,
    )


def open_(task: TaskHead, at: int = START, task_at: int | None = None) -> Open:
    return Open(open_id=derived_id("open", task.task_id), event_time=at, opened_at=at, head=task, task_at=task_at)


def tick() -> Tick:
    return Tick(event_time=0, partition=PARTITION)


def forget(**fields: Any) -> Forget:
    return Forget(forget_id="forget", event_time=START, **fields)


def log_of(*timed: tuple[int, Record | bytes]) -> list[LogRecord]:
    """A halves log: (append time after START, record or bytes) each."""
    return [record_at(offset, after, what) for offset, (after, what) in enumerate(timed)]


def record_at(offset: int, after: int, what: Record | bytes, key: str | None = None) -> LogRecord:
    if isinstance(what, bytes):
        return LogRecord(topics.HALVES, PARTITION, offset, START + after, key or "?", what)
    value = CODEC.encode(topics.HALVES, what)
    return LogRecord(topics.HALVES, PARTITION, offset, START + after, key or what.key, value)


@dataclass
class Written:
    """The output of a run, in order; decoded views by key (the last write of each)."""

    produced: list[tuple[str, str, bytes]] = field(default_factory=list)
    dead: list[tuple[int, str]] = field(default_factory=list)

    def _decoded(self, topic: str) -> dict[str, Any]:
        return {
            key: CODEC.decode(value, topic=t, partition=0, offset=0) for t, key, value in self.produced if t == topic
        }

    @property
    def outcomes(self) -> dict[str, Outcome]:
        return self._decoded(topics.OUTCOMES)

    @property
    def rollouts(self) -> dict[str, Rollout]:
        return self._decoded(topics.ROLLOUTS)


class Disk:
    """A worker's state on disk, and the changelog that it is a copy of. `age` as for `DiskStore`."""

    def __init__(self, folder: Path, age: Age | None) -> None:
        self.folder, self.age = folder, age
        self.made = 0
        self.store: DiskStore | None = None

    def fresh(self) -> None:
        """Another partition's worth of nothing."""
        self.close()
        self.made += 1

    def recovered(self, changelog: Sequence[Entry]) -> Mapping[str, bytes]:
        """The state with which a worker starts: its database, and the changelog entries after it."""
        self.close()
        self.store = DiskStore(self.folder / str(self.made), self.age)
        fold = self.store.open(PARTITION)
        for entry in changelog[fold.position :]:
            fold.add(entry)
        fold.settle(len(changelog))
        return self.store.entries(PARTITION)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None


def worker(entries: Mapping[str, bytes], limits: JoinLimits = LIMITS) -> JoinProcessor:
    processor = JoinProcessor(CODEC, limits)
    processor.restore(PARTITION, entries)
    return processor


def process(processor: JoinProcessor, batch: Sequence[LogRecord]) -> Effects:
    return asyncio.run(processor.process(PARTITION, batch)) if batch else Effects()


def drive(coroutine: Any) -> Any:
    """Runs a coroutine that waits for nothing but its turn, without the cost of an event loop."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as result:
        return result.value
    raise AssertionError("process() of the join waits for something")


@dataclass
class Cut:
    """The stage at which a flush is cut: stage 0 is the outputs, 1.. the waves, after the last the commit.

    Of this stage, the items whose index is in `kept` still arrive; with the real adapter, always the first ones.
    `back`: the number of records before the committed offset at which the successor starts. `wakes`: the number of the
    successor's batches after which the rest arrives; None: never.
    """

    stage: int
    kept: frozenset[int] = frozenset()
    back: int = 0
    wakes: int | None = None


class Partitioned:
    """One partition of the input and all that is written from it: topics, changelog, committed offset."""

    def __init__(self, log: Sequence[LogRecord], limits: JoinLimits = LIMITS, disk: Disk | None = None) -> None:
        self.log, self.limits, self.disk = list(log), limits, disk
        if disk is not None:
            disk.fresh()
        self.written = Written()
        self.changelog: list[Entry] = []
        self.store: dict[str, bytes] = {}
        self.committed = 0
        self._asleep: list[tuple[int, list[tuple[str, Any]]]] = []

    def recovered(self) -> dict[str, bytes]:
        """The state as the adapter reads it back: the greatest offset per key wins."""
        fold = ChangelogFold()
        for entry in self.changelog:
            fold.add(entry)
        return fold.state()

    def entries(self) -> Mapping[str, bytes]:
        """The state with which a worker starts."""
        self.store = self.recovered()
        if self.disk is None:
            return self.store
        table = self.disk.recovered(self.changelog)
        assert dict(table.items()) == self.store
        return table

    def start(self) -> JoinProcessor:
        return worker(self.entries(), self.limits)

    def run(self, sizes: Sequence[int] = (), cuts: Mapping[int, Cut] | None = None) -> Written:
        """Folds the log to its end in batches of `sizes` (repeated), with the flush of the i-th batch cut as told."""
        processor, position, batch_number = self.start(), self.committed, 0
        while position < len(self.log):
            size = sizes[batch_number % len(sizes)] if sizes else len(self.log)
            batch = self.log[position : position + size]
            cut = (cuts or {}).get(batch_number)
            batch_number += 1
            stages = self._stages(drive(processor.process(PARTITION, batch)), batch)
            if cut is None:
                for stage in stages:
                    self._arrive(stage)
                self._apply(stages)
                self.committed = max(self.committed, position + len(batch))
                position += len(batch)
            else:
                rest: list[tuple[str, Any]] = []
                for number, stage in enumerate(stages):
                    now = [item for i, item in enumerate(stage) if number < cut.stage or i in cut.kept]
                    if number <= cut.stage:
                        self._arrive(now)
                        rest += [item for item in stage if item not in now]
                    else:
                        rest += stage
                if cut.wakes is not None:
                    self._asleep.append((cut.wakes, rest))
                processor = self.start()
                position = max(0, self.committed - cut.back)
            self._wake()
        self._wake(everybody=True)
        return self.written

    def _stages(self, effects: Effects, batch: Sequence[LogRecord]) -> list[list[tuple[str, Any]]]:
        outputs: list[tuple[str, Any]] = [("out", (o.topic, o.key, o.value)) for o in effects.outputs]
        outputs += [("dead", (d.record.offset, d.stage)) for d in effects.dead]
        entries = iter(as_entries(effects.changes, self.store, batch[0].offset))
        return [outputs, *([("state", next(entries)) for _ in wave] for wave in effects.changes)]

    def _arrive(self, items: Sequence[tuple[str, Any]]) -> None:
        for kind, item in items:
            into: dict[str, list[Any]] = {
                "out": self.written.produced,
                "dead": self.written.dead,
                "state": self.changelog,
            }
            into[kind].append(item)

    def _apply(self, stages: Sequence[Sequence[tuple[str, Any]]]) -> None:
        if self.disk is not None and self.disk.store is not None:
            entries = [item for stage in stages[1:] for _, item in stage]
            self.disk.store.apply(PARTITION, entries, len(self.changelog) - 1)
        for kind, item in (pair for stage in stages for pair in stage):
            if kind == "state" and item.value is None:
                self.store.pop(item.key, None)
            elif kind == "state":
                self.store[item.key] = item.value

    def _wake(self, everybody: bool = False) -> None:
        asleep, self._asleep = self._asleep, []
        for left, rest in asleep:
            if left <= 0 or everybody:
                self._arrive(rest)
            else:
                self._asleep.append((left - 1, rest))


def fold(*timed: tuple[int, Record | bytes], limits: JoinLimits = LIMITS) -> Written:
    """Returns the output of an undisturbed worker for a log, in one batch."""
    return Partitioned(log_of(*timed), limits).run()


def alive(processor: JoinProcessor) -> dict[str, bytes]:
    """The headers of all tasks that a worker knows, and how far it is."""
    state = processor.partitions[PARTITION]
    known = [*state._open, *state._markers]
    headers = {task_id: state._header(task_id) or b"" for task_id in known}
    leavers = {str(offset): str(request).encode() for offset, request in state._kernel.forgotten._requests.items()}
    return headers | leavers | {"": f"{state.applied} {state.time}".encode()}


def needed(entries: Mapping[str, bytes], limits: JoinLimits = LIMITS, partition: int = PARTITION) -> dict[str, bytes]:
    """A state without the leftovers of its last batch, which the next one deletes."""
    fold = JoinPartition(HalvesPartition(topics.HALVES, partition), lambda *_: (), limits)  # type: ignore[arg-type]
    fold.restore(entries)
    return {key: value for key, value in entries.items() if key not in fold._changes.useless}
