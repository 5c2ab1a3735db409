"""Two logs, a changelog and workers that can be killed or stopped half-way: what pairing goes through in its life."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Feedback, Opens, Polarity, Result, Source, Terms
from streams.apps.hinting.processor import Hinting
from streams.apps.scoring.processor import Scoring
from streams.fold.pairing import LogReader, Pairing
from streams.runtime.decoding import Skipped
from streams.runtime.processor import Dead, Effects, LogRecord, OutputRecord
from streams.runtime.state import ChangelogFold, Entry, StateStore, as_entries
from tentalis.opd import FixedModel, Teacher
from tests.support.fake_inference import FakeInference
from tests.support.stream_records import CODEC, make_feedback, make_result, make_task, on_log, raw, unchecked

PARTITION = 3
HORIZON = 1_000
SLACK = 10
TERMS = Terms(rl=Source.USER, opd=Source.USER, opens=Opens.FIRST_FEEDBACK)
BOTH = (topics.RESULTS, topics.FEEDBACK)
App = Scoring | Hinting


def result(task: str, sample: int, answer: int = 1) -> Result:
    return make_result(make_task(task, terms=TERMS, n_samples=2), sample, response=(answer, sample))


def bare(task: str, sample: int | None, name: str, **fields: object) -> Feedback:
    """Feedback that names its task, perhaps a sample, and no more."""
    with_result = make_feedback(result(task, 0), feedback_id=name, polarity=Polarity.POSITIVE, **fields)
    return unchecked(with_result, result=None, sample_index=sample)  # type: ignore[no-any-return]


class Logs:
    """The two input topics of one partition, as they are on the broker."""

    def __init__(self) -> None:
        self.topics: dict[str, list[LogRecord]] = {topic: [] for topic in BOTH}
        self.reads = 0

    def put(self, topic: str, record: Result | Feedback, at: int) -> LogRecord:
        made = on_log(topic, record, len(self.topics[topic]), timestamp=at)
        self.topics[topic].append(made)
        return made

    def put_raw(self, topic: str, key: str, at: int) -> None:
        made = raw(topic, b"rubbish", len(self.topics[topic]), key)
        self.topics[topic].append(
            LogRecord(topic, PARTITION, made.offset, at, made.key, made.value, made.headers, made.tombstone)
        )

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, LogRecord]:
        assert partition == PARTITION
        self.reads += len(offsets)
        return {offset: self.topics[topic][offset] for offset in offsets}


def make_app(kind: str, logs: LogReader | None, horizon_ms: int = HORIZON) -> App:
    pairing = None if logs is None else Pairing(CODEC, logs, horizon_ms)
    if kind == "scoring":
        return Scoring(CODEC, pairing=pairing)

    async def model() -> str:
        return "base"

    return Hinting(CODEC, Teacher(FakeInference(), FixedModel(model)), pairing=pairing)


@dataclass
class Broker:
    """The broker's data, which outlive a worker."""

    kind: str
    logs: Logs = field(default_factory=Logs)
    changelog: list[Entry] = field(default_factory=list)
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOTH, 0))
    outputs: list[OutputRecord] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    given_up: list[LogRecord] = field(default_factory=list)
    """Feedback of which a worker said that no result came for it."""

    def state(self) -> dict[str, bytes]:
        fold = ChangelogFold()
        for entry in self.changelog:
            fold.add(entry)
        return fold.state()


class GivenUp(Skipped):
    def __init__(self, records: list[LogRecord]) -> None:
        super().__init__()
        self._records = records

    def add(self, record: LogRecord, error: Exception) -> None:
        self._records.append(record)


class Worker:
    """One incarnation of the application, with what the adapter does around it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.app = make_app(broker.kind, broker.logs)
        if isinstance(self.app, Hinting):
            self.app.unanswered = GivenUp(broker.given_up)
        self.store = StateStore()
        self.store.load(PARTITION, broker.state())
        self.app.restore(PARTITION, self.store.entries(PARTITION))
        self.position = dict(broker.committed)
        self.pending: list[list[Entry] | Effects] = []

    async def batch(self, topic: str, size: int) -> bool:
        """Computes a batch; nothing of it has happened before `flush`."""
        at = self.position[topic]
        records = self.broker.logs.topics[topic][at : at + size]
        if not records:
            return False
        self._computed(await self.app.process(PARTITION, records), records[0].offset)
        self.position[topic] += len(records)
        return True

    async def timer(self) -> bool:
        ends = {topic for topic in BOTH if self.position[topic] == len(self.broker.logs.topics[topic])}
        if not self.app.due(PARTITION, ends):
            return False
        self._computed(await self.app.expire(PARTITION), -1)
        return True

    def _computed(self, effects: Effects, first: int) -> None:
        assert not self.pending
        entries = as_entries(effects.changes, self.store.entries(PARTITION), first)
        self.pending = [effects, *([entry] for entry in entries)]

    def flush(self, steps: int | None = None) -> None:
        """Carries out the next steps of what was computed; all of them if no number is given."""
        count = len(self.pending) if steps is None else steps
        for step in self.pending[:count]:
            if isinstance(step, Effects):
                self.broker.outputs += step.outputs
                self.broker.dead += step.dead
            else:
                self.broker.changelog += step
                self.store.apply(PARTITION, step)
        self.pending = self.pending[count:]

    def commit(self) -> None:
        assert not self.pending
        self.broker.committed = dict(self.position)


def half_ids(outputs: Sequence[OutputRecord]) -> dict[tuple[str, str], bytes]:
    """Outputs by what makes them the same; asserts that what is written twice is the same."""
    found: dict[tuple[str, str], bytes] = {}
    for output in outputs:
        key = (output.key, dict(output.headers)["ce_id"].decode())
        assert found.setdefault(key, output.value) == output.value, "one id, two contents"
    return found


async def expected(kind: str, logs: Logs) -> tuple[dict[tuple[str, str], bytes], set[int]]:
    """By brute force from the two logs: the halves of all feedback, and the offsets of that which has no result."""
    app = make_app(kind, None)
    outputs: list[OutputRecord] = []
    lonely: set[int] = set()
    results = [
        (record, CODEC.decode(record.value, topic=topics.RESULTS, partition=PARTITION, offset=0, expected=("Result",)))
        for record in logs.topics[topics.RESULTS]
        if record.value != b"rubbish"
    ]
    for record in logs.topics[topics.FEEDBACK]:
        if record.value == b"rubbish":
            continue
        feedback = CODEC.decode(
            record.value, topic=topics.FEEDBACK, partition=PARTITION, offset=0, expected=("Feedback",)
        )
        assert isinstance(feedback, Feedback)
        spoken: dict[int, Result] = {}
        if feedback.result is not None:
            spoken[0] = feedback.result
        else:
            for place, answer in results:
                assert isinstance(answer, Result)
                near = abs(place.timestamp - record.timestamp) <= HORIZON
                if near and answer.key == record.key and feedback.sample_index in (None, answer.sample_index):
                    spoken.setdefault(answer.sample_index, answer)
        if not spoken:
            lonely.add(record.offset)
        for answer in spoken.values():
            whole = feedback.model_copy(update={"result": answer, "sample_index": answer.sample_index})
            made = on_log(topics.FEEDBACK, whole, record.offset, timestamp=record.timestamp)
            outputs += (await app.process(PARTITION, [made])).outputs
    return half_ids(outputs), lonely


def far_end(logs: Logs, at: int) -> None:
    """Records of another task, so much later that nothing waits any more."""
    strange = result("elsewhere", 0)
    logs.put(topics.RESULTS, strange, at)
    logs.put(topics.FEEDBACK, make_feedback(strange, feedback_id=derived_id("feedback", at)), at)
