"""Experience as a stream application: an ended session becomes late OPD halves, one for each of its turns.

The lesson is extracted from the last turn's event alone, since clients send the whole conversation with each request.
It is requested once. Each turn is then read again at its offset, its result is rebuilt as the sessions built it, and
the teacher scores it with the lesson in the prompt. The source of such a half is never the one that the terms wait for,
so it is late by construction and becomes a separate rollout (`<task>/<sample>/opd/<half id>`), unless the turn has an
OPD part already. In a session that the gateway guessed, a turn that the last one does not continue is of another
conversation, and the lesson is not for it.

Undecodable events are skipped: the sessions own the dead letters of that topic.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.records import Hint, Record, SessionEvent, sample_of
from schemas.wire.codec import Codec, DecodeError
from streams.apps.experience import metrics
from streams.apps.experience.core import EndedSession, ExperiencePartition, TurnRef, experience_half
from streams.fold.clock import DAY_MS
from streams.fold.continuation import is_guessed, same_conversation
from streams.fold.forgotten import FORGET_TTL_MS
from streams.fold.session_turns import result_of
from streams.fold.teacher_calls import AT_ONCE, refused_for_good, retry_of
from streams.runtime.call_cache import CallCache, CallSlots
from streams.runtime.decoding import Skipped, output
from streams.runtime.log_reader import KafkaLogReader, LogReader
from streams.runtime.metrics import SKIPPED, STREAM_DECODE_SECONDS
from streams.runtime.processor import Effects, LogRecord, OutputRecord, Retryable
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable
from tentalis.inference.replicas.metrics import export_replicas
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.kafka import topology
from tentalis.opd import Teacher, TeacherRefused
from tentalis.opd.config import BadHinters, Hinters
from tentalis.opd.lesson import Lesson, LessonJudge
from tentalis.opd.verdict import VoteStatus
from tentalis.rewards.verdict import ScorerAway
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

APP_ID = topology.named("experience").app_id
GONE, OTHER_CONVERSATION = "gone", "other_conversation"


class Experience:
    """The `streams.runtime.processor.Processor` of the application; see the module docstring.

    Args:
        reader: reads turns again.
        shorten: cuts a lesson to its limit of tokens.
        idle_ms: log time after its last main turn at which a session ends.
        remember_ms: log time for which the ids of events, and the counts of ended sessions, are remembered: as long as
            in the sessions application.
        forget_ttl_ms: log time for which a request to forget is remembered.
    """

    app_id = APP_ID
    topics: tuple[str, ...] = (topics.SESSIONS,)
    table: str | None = "state"

    def __init__(
        self,
        codec: Codec,
        reader: LogReader,
        judge: LessonJudge,
        teacher: Teacher,
        shorten: Callable[[str], Awaitable[str]],
        *,
        idle_ms: int,
        remember_ms: int = DAY_MS,
        forget_ttl_ms: int = FORGET_TTL_MS,
        at_once: int = AT_ONCE,
        routers: Sequence[ReplicaRouter] = (),
    ) -> None:
        """`routers`: of the replicas that the teacher asks."""
        self._routers = routers
        self._codec, self._reader, self._judge, self._teacher = codec, reader, judge, teacher
        self._shorten = shorten
        self._times = {"idle_ms": idle_ms, "remember_ms": remember_ms, "forget_ttl_ms": forget_ttl_ms}
        self.partitions: dict[int, ExperiencePartition] = {}
        self._lessons = CallCache[tuple[int, int], Lesson](at_once)
        self._answers = CallCache[tuple[int, int], Hint | str](at_once)
        self._said: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._skipped = Skipped()
        self.steps = 0
        """Lessons and teacher calls answered so far."""

    def asking(self, partition: int) -> bool:
        """Returns true if a batch waits for the judge or the teacher."""
        return partition in self._lessons.asking | self._answers.asking

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the application."""
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        export_replicas(exporter, self._routers)
        exporter.read(SKIPPED, lambda: self._skipped.count)
        exporter.read(metrics.EXPERIENCE_OPEN, lambda: sum(map(len, self.partitions.values())))
        exporter.read(metrics.EXPERIENCE_LESSONS, lambda: {(said,): count for said, count in self._said.items()})
        exporter.read(metrics.EXPERIENCE_TURNS, lambda: {(what,): count for what, count in self._turns.items()})

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores a partition. Raises DamagedState for entries that this application did not write."""
        self.partitions[partition] = ExperiencePartition(partition, entries, **self._times)

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._lessons.revoke(partition)
        self._answers.revoke(partition)
        self.partitions.pop(partition, None)

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns nothing: the ticks of the application `sessions` are on the same topic and move this clock too."""
        return ()

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds a batch, and makes the halves of the sessions that end in it.

        Raises:
            Retryable: the judge or the teacher is unavailable, or a turn cannot be read again.
            OtherTokenizer: the tokenizers of teacher and student differ.
        """
        with self._lessons.batch(partition, records), self._answers.batch(partition, records):
            fold, ended = self.partitions[partition], list[EndedSession]()
            for record in records:
                ended += fold.advance(record.offset, record.timestamp)
                try:
                    event = self._decoded(record)
                except DecodeError as error:
                    self._skipped.add(record, error)
                else:
                    ended += fold.apply(event, len(record.value))
            effects = Effects()
            for half in await self._learnt(partition, [each for each in ended if not fold.forgotten(each)]):
                if isinstance(half, Hint):
                    effects.outputs.append(output(self._codec, topics.HALVES, half, APP_ID))
                self._turns["accepted" if isinstance(half, Hint) else half] += 1
            self._turns.update(fold.left_out)
            fold.left_out.clear()
            effects.changes = fold.take_changes()
            return effects

    async def _learnt(self, partition: int, ended: Sequence[EndedSession]) -> list[Hint | str]:
        keys = [(session.turns[0].offset, session.turns[-1].offset) for session in ended]
        asked = [(key, partial(self._lesson, partition, each)) for key, each in zip(keys, ended, strict=True)]
        lessons = await self._lessons.ask(partition, asked)
        questions = [
            ((key[0], turn.offset), partial(self._half, partition, session, turn, lesson.text))
            for key, session, lesson in zip(keys, ended, lessons, strict=True)
            if lesson.status is VoteStatus.ACCEPTED
            for turn in session.turns
        ]
        halves = await self._answers.ask(partition, questions)
        self._said.update(lesson.status.value for lesson in lessons)
        return halves

    async def _lesson(self, partition: int, ended: EndedSession, turns: CallSlots) -> Lesson:
        event = await self._event(partition, ended.turns[-1])
        if event is None:
            return Lesson(VoteStatus.LOST)
        try:
            async with turns:
                lesson = await self._judge.lesson(event.messages, event.response)
                self.steps += 1
            if lesson.status is VoteStatus.ACCEPTED:
                lesson = Lesson(lesson.status, await self._shorten(lesson.text))
        except (ScorerAway, InferenceError) as error:
            if refused_for_good(error):
                log.warning("no lesson from session %s: %s", ended.head.session_id, error)
                return Lesson(VoteStatus.TOO_LONG)
            raise Retryable(f"the lesson of a session is unavailable: {error}") from error
        return lesson

    async def _half(
        self, partition: int, ended: EndedSession, turn: TurnRef, lesson: str, turns: CallSlots
    ) -> Hint | str:
        """Returns the half of a turn, or the reason why there is none."""
        event = await self._event(partition, turn)
        if event is None:
            return GONE
        if is_guessed(event.session_id):
            last = await self._event(partition, ended.turns[-1])
            if last is None or not same_conversation(event, last):
                return OTHER_CONVERSATION
        result = result_of(event, turn.number, turn.at)
        try:
            async with turns:
                taught = await self._teacher.logprobs(sample_of(result), result.task, [lesson])
                self.steps += 1
        except TeacherRefused as refusal:
            log.warning("no experience for result %s: %s", result.result_id, refusal)
            return refusal.reason
        except (ServerUnavailable, RequestRefused) as error:
            if (retry := retry_of(error)) is not None:
                raise retry from error
            log.warning("no experience for result %s: %s", result.result_id, error)
            return "failed"
        return experience_half(result, ended, lesson, taught, self._judge.name)

    async def _event(self, partition: int, turn: TurnRef) -> SessionEvent | None:
        """Returns the event of a turn, None if the log no longer has it."""
        record = (await self._reader.read(topics.SESSIONS, partition, [turn.offset]))[turn.offset]
        if record is None:
            log.error(
                "%s[%d]@%d is no longer on the log: extend its retention", topics.SESSIONS, partition, turn.offset
            )
            return None
        event = self._decoded(record)
        return event if isinstance(event, SessionEvent) else None

    def _decoded(self, record: LogRecord) -> Record:
        return self._codec.decode(
            None if record.tombstone else record.value,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            expected=topics.table().records_of(topics.SESSIONS),
        )


def build(settings: Settings, *, server: str, hinters: Hinters, idle_ms: int, remember_ms: int = DAY_MS) -> Experience:
    """Builds the application of a process.

    Raises:
        BadHinters: the file has no `lesson` part.
        OtherTokenizer, NoApiKey: as for hinting.
    """
    import asyncio

    from tentalis.kafka.codec import make_codec
    from tentalis.opd.wiring import check_teacher, make_lesson_judge, make_teacher, token_cutter

    if hinters.lesson is None:
        raise BadHinters(
            "the hinters file has no `lesson`: name the model that extracts lessons (docs/concepts/hints.md)"
        )
    asyncio.run(check_teacher(hinters.teacher, server))
    judge, cut = make_lesson_judge(hinters.lesson), token_cutter(server, hinters.lesson.most_tokens)
    teacher = make_teacher(hinters.teacher, server)
    codec = make_codec(settings, patience=0.0)
    reader = KafkaLogReader(settings)
    return Experience(
        codec,
        reader,
        judge,
        teacher,
        cut,
        idle_ms=idle_ms,
        remember_ms=remember_ms,
        routers=teacher.routers,
    )
