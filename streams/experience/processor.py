"""Experience as a stream application: a session that has ended becomes late OPD halves, one for each of its turns.

The lesson is extracted from the last turn's event alone: clients send the whole conversation with each request. It is
asked for once; then each turn is read again at its offset, its result made again as the sessions made it, and scored by
the teacher with the lesson in the prompt. A half answers to no feedback source, so it is late by construction and
becomes a rollout of its own (`<task>/<sample>/opd/<half id>`), unless the turn has an OPD part already.

Undecodable events are passed over: the sessions own that topic's dead letters.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.ids import derived_id
from schemas.records import Hint, HintKind, Record, Result, SessionEvent, Source, sample_of
from streams.answers import Answers, Turns
from streams.experience.core import Ended, Partition, Turn
from streams.hinting import AT_ONCE, LATER
from streams.intake import Skipped, output
from streams.join.forgotten import FORGET_TTL_MS
from streams.log_reader import KafkaLogReader, LogReader
from streams.processor import Effects, LogRecord, Output, Retryable
from streams.sessions.core import DAY_MS
from streams.sessions.turns import result_of
from tentalis import metrics
from tentalis.config import Settings
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable
from tentalis.metrics import Exporter
from tentalis.opd import Taught, Teacher, TeacherRefused
from tentalis.opd.config import BadHinters, Hinters
from tentalis.opd.lesson import Lesson, LessonJudge
from tentalis.opd.verdict import Said
from tentalis.rewards import ScorerAway

log = logging.getLogger(__name__)

APP_ID = "tentalis-experience"
GONE = "gone"


def experience_half(result: Result, ended: Ended, lesson: str, taught: Taught, by: str) -> Hint:
    """The late OPD half of a turn: one per result and maker of lessons, however often its session ends."""
    return Hint(
        hint_id=derived_id("experience", result.result_id, by),
        event_time=ended.at,
        opened_at=result.opened_at,
        sample=sample_of(result),
        # No terms can name it for the OPD half.
        source=Source.RESULT,
        kind=HintKind.ACCEPTED,
        hints=(lesson,),
        teacher_policy=taught.teacher,
        teacher_logprobs=taught.logprobs,
        hinter=by,
        topk=taught.topk,
        topk_ids=taught.topk_ids,
        topk_logprobs=taught.topk_logprobs,
    )


class Experience:
    """`streams.processor.Processor`; see the module's text.

    Args:
        reader: reads turns again.
        shorten: cuts a lesson to what it may have in tokens.
        idle_ms: log time after its last main turn at which a session is over.
        remember_ms: log time for which the ids of events, and the counts of sessions that have ended, are remembered:
            as long as the sessions remember theirs.
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
    ) -> None:
        self._codec, self._reader, self._judge, self._teacher = codec, reader, judge, teacher
        self._shorten = shorten
        self._times = {"idle_ms": idle_ms, "remember_ms": remember_ms, "forget_ttl_ms": forget_ttl_ms}
        self.partitions: dict[int, Partition] = {}
        self._lessons = Answers[tuple[int, int], Lesson](at_once)
        self._answers = Answers[tuple[int, int], Hint | str](at_once)
        self._said: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._skipped = Skipped()
        self.steps = 0
        """Lessons and calls to the teacher answered so far."""

    def asking(self, partition: int) -> bool:
        """Whether a batch waits for the judge or the teacher."""
        return partition in self._lessons.asking | self._answers.asking

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics."""
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.SKIPPED, lambda: self._skipped.count)
        exporter.read(metrics.EXPERIENCE_OPEN, lambda: sum(map(len, self.partitions.values())))
        exporter.read(metrics.EXPERIENCE_LESSONS, lambda: {(said,): count for said, count in self._said.items()})
        exporter.read(metrics.EXPERIENCE_TURNS, lambda: {(what,): count for what, count in self._turns.items()})

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Raises StateError if the entries cannot come from here."""
        self.partitions[partition] = Partition(partition, entries, **self._times)

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._lessons.revoke(partition)
        self._answers.revoke(partition)
        self.partitions.pop(partition, None)

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Nothing beside the input: the sessions' own ticks move this clock too."""
        return ()

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Folds a batch, and makes the halves of the sessions that end in it.

        Raises:
            Retryable: the judge or the teacher cannot be asked now, or a turn cannot be read again.
            OtherTokenizer: the teacher's tokens are not the student's.
        """
        with self._lessons.batch(partition, records), self._answers.batch(partition, records):
            fold, ended = self.partitions[partition], list[Ended]()
            for record in records:
                ended += fold.advance(record.timestamp)
                try:
                    event = self._decoded(record)
                except DecodeError as error:
                    self._skipped.add(record, error)
                else:
                    ended += fold.apply(event, record.offset, len(record.value))
            effects = Effects()
            for half in await self._learnt(partition, [each for each in ended if not fold.forgotten(each)]):
                if isinstance(half, Hint):
                    effects.outputs.append(output(self._codec, topics.HALVES, half, APP_ID))
                self._turns["accepted" if isinstance(half, Hint) else half] += 1
            self._turns.update(fold.left_out)
            fold.left_out.clear()
            effects.changes = fold.take_changes()
            return effects

    async def _learnt(self, partition: int, ended: Sequence[Ended]) -> list[Hint | str]:
        keys = [(session.turns[0].offset, session.turns[-1].offset) for session in ended]
        asked = [(key, partial(self._lesson, partition, each)) for key, each in zip(keys, ended, strict=True)]
        lessons = await self._lessons.ask(partition, asked)
        questions = [
            ((key[0], turn.offset), partial(self._half, partition, session, turn, lesson.text))
            for key, session, lesson in zip(keys, ended, lessons, strict=True)
            if lesson.said is Said.ACCEPTED
            for turn in session.turns
        ]
        halves = await self._answers.ask(partition, questions)
        self._said.update(lesson.said.value for lesson in lessons)
        return halves

    async def _lesson(self, partition: int, ended: Ended, turns: Turns) -> Lesson:
        event = await self._event(partition, ended.turns[-1])
        if event is None:
            return Lesson(Said.LOST)
        try:
            async with turns:
                lesson = await self._judge.lesson(event.messages, event.response)
                self.steps += 1
            if lesson.said is Said.ACCEPTED:
                lesson = Lesson(lesson.said, await self._shorten(lesson.text))
        except (ScorerAway, InferenceError) as error:
            if isinstance(error, RequestRefused) and error.status not in LATER:
                log.warning("the lesson of session %s is no use: %s", ended.head.session_id, error)
                return Lesson(Said.TOO_LONG)
            raise Retryable(f"the lesson of a session cannot be had now: {error}") from error
        return lesson

    async def _half(self, partition: int, ended: Ended, turn: Turn, lesson: str, turns: Turns) -> Hint | str:
        """The half of a turn, or the word for why there is none."""
        event = await self._event(partition, turn)
        if event is None:
            return GONE
        result = result_of(event, turn.number, turn.at)
        try:
            async with turns:
                taught = await self._teacher.logprobs(sample_of(result), result.task, [lesson])
                self.steps += 1
        except TeacherRefused as refusal:
            log.warning("no experience for result %s: %s", result.result_id, refusal)
            return refusal.reason
        except ServerUnavailable as error:
            raise Retryable(f"the teacher is away: {error}") from error
        except RequestRefused as error:
            if error.status in LATER:
                raise Retryable(f"the teacher cannot be asked now: {error}") from error
            log.warning("no experience for result %s: %s", result.result_id, error)
            return "failed"
        return experience_half(result, ended, lesson, taught, self._judge.name)

    async def _event(self, partition: int, turn: Turn) -> SessionEvent | None:
        """The event of a turn, None if the log has it no more."""
        record = (await self._reader.read(topics.SESSIONS, partition, [turn.offset]))[turn.offset]
        if record is None:
            log.error(
                "%s[%d]@%d is gone from the log: keep the topic for longer", topics.SESSIONS, partition, turn.offset
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
    """The application for a process.

    Raises:
        BadHinters: the file has no `lesson` part.
        OtherTokenizer, NoApiKey: as for hinting.
    """
    import asyncio

    from tentalis.kafka import make_codec
    from tentalis.opd.wiring import look_at_teacher, make_lesson_judge, make_teacher, token_cut

    if hinters.lesson is None:
        raise BadHinters("the file has no `lesson`: say which model extracts lessons (docs/hints.md)")
    asyncio.run(look_at_teacher(hinters.teacher, server))
    judge, cut = make_lesson_judge(hinters.lesson), token_cut(server, hinters.lesson.most_tokens)
    teacher = make_teacher(hinters.teacher, server)
    codec = make_codec(settings, patience=0.0)
    reader = KafkaLogReader(settings)
    return Experience(codec, reader, judge, teacher, cut, idle_ms=idle_ms, remember_ms=remember_ms)
