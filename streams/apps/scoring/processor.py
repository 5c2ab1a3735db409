"""Scoring: tasks open, and results and feedback become the RL half.

| input | output |
|---|---|
| Task that opens immediately | Open, opened at the task's append time |
| Result, if the reward comes from it | Score by the task's verifier, -1 if the result failed |
| Feedback from the reward's source | Score from its grade, or by the task's verifier if that is a `FeedbackJudge` |
|  | for this source, such as a next-state judge |
| Feedback from a source that the terms do not name | Score if it has a grade: a late half |
| Feedback from a source of the terms, on a task that opens with its first one | Open, opened at its append time |

A result or feedback from the reward's source makes a Score even if the reward is unknown.
Earlier grades from other sources are parts of a `combined` reward (`streams.apps.scoring.grades`,
docs/concepts/judges.md).
Feedback that names only a task is paired with its results (`streams.fold.pairing`, docs/concepts/feedback.md).
Owner of the dead letters of tasks and results; hinting owns those of feedback.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.records import Open, Record, Result, Score, Source, Task
from schemas.wire.codec import Codec
from streams.apps.scoring import metrics
from streams.apps.scoring.core import judge_of, opened_by_feedback, opened_by_task, score_of_feedback
from streams.apps.scoring.grades import GRADE_HORIZON_MS, PREFIX, Grades
from streams.apps.scoring.judging import Judging
from streams.fold.pairing import HORIZON_MS, TABLE, Paired, Pairing, carried, measure_pairing, said_in
from streams.runtime.call_cache import CallCache
from streams.runtime.decoding import INVALID, Skipped, dead, decoded, output
from streams.runtime.log_reader import KafkaLogReader
from streams.runtime.metrics import SKIPPED, STREAM_DECODE_SECONDS
from streams.runtime.processor import Effects, LogRecord, OutputRecord, in_turns
from tentalis.kafka import topology
from tentalis.rewards import registry
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import FeedbackJudge, GradingJudge, Verdict
from tentalis.service import tracing
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings

APP_ID = topology.named("scoring").app_id


class Scoring:
    """The application; see the module docstring.

    Args:
        judging: makes the verdicts.
        pairing: finds the results of feedback that carries none; without pairing such feedback is skipped.
        grades: finds grades from other sources for rewards of several parts; without it these parts are missing.
    """

    app_id = APP_ID
    topics = (topics.TASKS, topics.RESULTS, topics.FEEDBACK)

    def __init__(
        self,
        codec: Codec,
        judging: Judging | None = None,
        pairing: Pairing | None = None,
        grades: Grades | None = None,
    ) -> None:
        self._codec = codec
        self._judging = judging or Judging()
        # Verdicts of slow scorers, by result, scorer and feedback.
        self._verdicts = CallCache[tuple[str, str, str | None], Verdict](self._judging.limits.at_once)
        self._pairing, self._grades = pairing, grades
        self.table: str | None = None if pairing is None and grades is None else TABLE
        self.skipped = Skipped()

    @property
    def steps(self) -> int:
        """Slow calls answered so far, and votes and other progress within them."""
        return sum(self._judging.ended.values()) + sum(_votes().values()) + registry.inner_steps()

    def asking(self, partition: int) -> bool:
        """Returns true if a batch waits for slow calls."""
        return partition in self._verdicts.asking

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the application."""
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(SKIPPED, lambda: self.skipped.count)
        exporter.read(metrics.JUDGE_CALLS, lambda: {(end,): count for end, count in self._judging.ended.items()})
        exporter.read(metrics.JUDGE_UNKNOWN, lambda: self._judging.unknown)
        exporter.read(metrics.JUDGE_VOTES, _votes)
        exporter.read(metrics.JUDGE_UNPARSABLE, _unparsable)
        measure_pairing(self._pairing, exporter)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores the recent results, waiting feedback and recent grades of a partition."""
        graded = {key: value for key, value in entries.items() if key.startswith(PREFIX)}
        if self._grades is not None:
            self._grades.restore(partition, graded)
        if self._pairing is not None:
            self._pairing.restore(partition, {key: value for key, value in entries.items() if key not in graded})

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._verdicts.revoke(partition)
        if self._grades is not None:
            self._grades.revoke(partition)
        if self._pairing is not None:
            self._pairing.revoke(partition)

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns nothing: all output comes from input."""
        return ()

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Returns true if feedback waits for a result that can no longer come."""
        return self._pairing is not None and self._pairing.due(partition, at_end)

    async def expire(self, partition: int) -> Effects:
        """Gives up the feedback for which no result can come."""
        effects = Effects()
        self._settle(partition, effects)
        return effects

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Returns the Opens and Scores of a batch of tasks, results or feedback, in the order of the input; slow
        verdicts are requested concurrently.

        Raises Retryable while a judge is unavailable or a record cannot be read again.
        """
        with self._verdicts.batch(partition, records):
            return await self._process(partition, records)

    async def _process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        effects = Effects()
        halves: list[Record] = []
        pairs: list[Paired] = []
        if records[0].topic == topics.TASKS:
            halves += self._opened(records, effects)
        elif records[0].topic == topics.FEEDBACK:
            pairs = await self._feedback(partition, records)
        else:
            halves += await self._scores(partition, records, effects)
            if self._pairing is not None:
                pairs = await self._pairing.with_results(partition, records)
        halves += await self._spoken(partition, pairs)
        # All records about a task have its id as their key, and the samples of a task came in one trace.
        headers = {record.key: record.headers for record in records} if tracing.enabled() else {}
        for half in halves:
            parent = tracing.continued(headers.get(half.key, ()), half.key)
            with tracing.span("score", parent=parent) as span:
                effects.outputs.append(output(self._codec, topics.HALVES, half, APP_ID, span.traceparent))
        self._settle(partition, effects)
        return effects

    def _settle(self, partition: int, effects: Effects) -> None:
        if self._pairing is not None:
            self._pairing.dispose(partition)
            effects.changes = self._pairing.changes(partition)
        if self._grades is not None:
            effects.changes += self._grades.changes(partition)

    async def _scores(self, partition: int, records: Sequence[LogRecord], effects: Effects) -> list[Score]:
        scored: list[tuple[Result, int, Verdict | None]] = []
        async for record in in_turns(records):
            try:
                result = decoded(self._codec, record, Result)
                registry.check(result.task)
                if result.task.terms.rl is Source.RESULT:
                    scored.append((result, record.timestamp, self._judging.at_once(result)))
            except INVALID as error:
                effects.dead.append(dead(record, error))
        slow = [
            ((result.result_id, registry.scorer_name(result.task), None), partial(self._judging.slowly, result))
            for result, _, verdict in scored
            if verdict is None
        ]
        later = iter(await self._verdicts.ask(partition, slow))
        return [
            score_of_result(result, verdict or next(later), registry.scorer_name(result.task), appended)
            for result, appended, verdict in scored
        ]

    def _opened(self, records: Sequence[LogRecord], effects: Effects) -> list[Open]:
        found: list[Open] = []
        for record in records:
            try:
                task = decoded(self._codec, record, Task)
                registry.check(task)
            except INVALID as error:
                effects.dead.append(dead(record, error))
                continue
            opened = opened_by_task(task, record.timestamp)
            if opened is not None:
                found.append(opened)
        return found

    async def _feedback(self, partition: int, records: Sequence[LogRecord]) -> list[Paired]:
        said = said_in(self._codec, self._pairing, partition, records, self.skipped.add)
        if self._grades is not None:
            for record, feedback in said:
                self._grades.heard(partition, record, feedback)
        if self._pairing is None:
            return carried(said)
        pairs, _ = await self._pairing.with_feedback(partition, said, records)
        return pairs

    async def _spoken(self, partition: int, pairs: Sequence[Paired]) -> list[Record]:
        """Returns the halves of feedback that is paired with its result."""
        judges = [judge_of(paired.feedback) for paired in pairs]
        questions = [
            (
                (paired.result.result_id, judge.name, paired.feedback.feedback_id),
                partial(
                    self._judging.slowly,
                    paired.result,
                    feedback=paired.feedback,
                    grades=await self._grades_before(partition, paired, judge),
                ),
            )
            for paired, judge in zip(pairs, judges, strict=True)
            if judge is not None
        ]
        verdicts = iter(await self._verdicts.ask(partition, questions))
        made: list[Open | Score | None] = []
        for paired, judge in zip(pairs, judges, strict=True):
            feedback, appended = paired.feedback, paired.record.timestamp
            made.append(opened_by_feedback(feedback, appended))
            if judge is None:
                made.append(score_of_feedback(feedback, appended))
            else:
                made.append(score_of_feedback(feedback, appended, next(verdicts), judge.name))
        return [half for half in made if half is not None]

    async def _grades_before(self, partition: int, paired: Paired, judge: FeedbackJudge) -> Mapping[Source, float]:
        if self._grades is None or not isinstance(judge, GradingJudge):
            return {}
        return await self._grades.before(partition, paired)


def _votes() -> dict[tuple[str, ...], int]:
    return {
        (scorer, kind): count
        for scorer, tally in registry.vote_counts().items()
        for kind, count in tally.counts.items()
    }


def _unparsable() -> dict[tuple[str, ...], float]:
    return {(scorer,): tally.unparsable_ratio for scorer, tally in registry.vote_counts().items()}


def build(settings: Settings, *, feedback_horizon_ms: int = HORIZON_MS) -> Scoring:
    """Builds the application of a process, with the configured codec and the scorers of installed packages.

    Args:
        feedback_horizon_ms: the longest time between feedback and its result; 0: feedback carries its result.
    """
    from tentalis.kafka.codec import make_codec

    registry.load_plugins()
    codec = make_codec(settings, patience=0.0)
    if not feedback_horizon_ms:
        return Scoring(codec)
    reader = KafkaLogReader(settings)
    pairing = Pairing(codec, reader, feedback_horizon_ms)
    return Scoring(codec, pairing=pairing, grades=Grades(codec, reader, max(feedback_horizon_ms, GRADE_HORIZON_MS)))
