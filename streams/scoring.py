"""Scoring: tasks open, results and feedback become the RL half.

| input | output |
|---|---|
| Task that opens at once | Open, opened at the task's append time |
| Result, the reward answers to the result | Score by the task's verifier, -1 if it failed; unknown is written too |
| Feedback, the reward answers to its source | Score of its grade, or by the task's verifier if that is a
  `FeedbackJudge` for this source, a next-state judge for one; unknown is written too |
| Feedback from a source that the terms do not name at all | Score if it has a grade: a late half |
| Feedback from a source of the terms, on a task that opens with the first | Open, opened at its append time |

What other sources said before is a part of a `combined` reward (`streams.grades`, docs/judges.md).
Feedback that names a task and no more is paired with the results it speaks of (`streams.pairing`, docs/feedback.md).
Owner of the dead letters of tasks and results. Feedback that cannot be read is hinting's.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from schemas import topics
from schemas.codec import Codec
from schemas.ids import derived_id
from schemas.records import Feedback, Open, Opens, Record, Result, Score, Source, Task, Terms, TokenSpan, sample_of
from schemas.tensors import float32_bytes
from streams.answers import Answers
from streams.grades import PREFIX, Grades
from streams.intake import INVALID, Skipped, dead, decoded, output
from streams.judging import Judging
from streams.log_reader import KafkaLogReader
from streams.pairing import HORIZON_MS, TABLE, Paired, Pairing, carried, measure_pairing, said_in
from streams.processor import Effects, LogRecord, Output, in_turns
from tentalis import metrics, rewards, tracing
from tentalis.config import Settings
from tentalis.metrics import Exporter
from tentalis.rewards import FeedbackJudge, GradingJudge, RewardError, Verdict, grade

APP_ID = "tentalis-scoring"
FEEDBACK_SCORER = "feedback/1"


# --- pure -------------------------------------------------------------------------------------------------------------


def opened_by_task(task: Task, appended: int) -> Open | None:
    """The Open of a task appended at `appended` (ms), None if it opens with its first feedback."""
    if task.terms.opens is not Opens.AT_ONCE:
        return None
    return Open(
        open_id=derived_id("open", task.task_id),
        event_time=appended,
        opened_at=appended,
        head=task.head,
        task_at=appended,
    )


def opened_by_feedback(feedback: Feedback, appended: int) -> Open | None:
    """The Open of a task that waits for its first feedback from a source that its terms name. Each such feedback makes
    one, the join takes the first.

    Of others none: a thumb on a turn would begin its deadline while the next message is still to be written.
    """
    if feedback.result is None:
        return None
    task = feedback.result.task
    if task.terms.opens is not Opens.FIRST_FEEDBACK or not named(task.terms, feedback.source):
        return None
    return Open(
        open_id=derived_id("open", task.task_id, feedback.feedback_id),
        event_time=appended,
        opened_at=appended,
        head=task.head,
        task_at=feedback.result.opened_at,
    )


def opened_at(result: Result, appended: int) -> int:
    """When the task of a half on this result was opened (ms); `appended`: append time of the feedback behind it."""
    return appended if result.task.terms.opens is Opens.FIRST_FEEDBACK else result.opened_at


def score_of_result(result: Result, verdict: Verdict, scorer: str, appended: int) -> Score:
    """The RL half that answers to a result."""
    return Score(
        score_id=derived_id("score", result.result_id, scorer, None),
        event_time=appended,
        opened_at=result.opened_at,
        sample=sample_of(result),
        source=Source.RESULT,
        scorer=scorer,
        task_at=result.opened_at,
        **_said(verdict),
    )


def _said(verdict: Verdict) -> dict[str, Any]:
    """The fields of a Score that a verdict fills."""
    return {
        "reward": verdict.reward,
        "components": verdict.components,
        "votes": verdict.votes,
        "step_scores": float32_bytes([step.score for step in verdict.steps]),
        "step_spans": tuple(TokenSpan(start=step.start, end=step.end) for step in verdict.steps),
    }


def named(terms: Terms, source: Source) -> bool:
    """Whether the terms wait for this source in any half."""
    return source in (terms.rl, terms.opd)


def judge_of(feedback: Feedback) -> FeedbackJudge | None:
    """Who is to say what a feedback means for the reward: the task's scorer, if the reward answers to this source and
    the scorer judges by feedback from there. None: its grade says it. A grade that comes with the feedback stands,
    unless the scorer makes it a part of the reward.
    """
    result = feedback.result
    if result is None or feedback.source is not result.task.terms.rl:
        return None
    try:
        scorer = rewards.scorer_of(result.task)
        if scorer is not None:
            scorer.check(result.task)
    except RewardError:
        return None  # the task and its result are dead letters for that, and say what is wrong
    if not isinstance(scorer, FeedbackJudge) or feedback.source not in scorer.sources:
        return None
    return scorer if scorer.grades or grade(feedback) is None else None


def score_of_feedback(
    feedback: Feedback, appended: int, verdict: Verdict | None = None, scorer: str = FEEDBACK_SCORER
) -> Score | None:
    """The RL half that a feedback makes, None if it makes none or has no result with it. `verdict`: of `scorer`, if
    that was asked; else the grade of the feedback.

    The source that the reward answers to always makes one. One that the terms name for the hint only makes none: its
    polarity is about the hint, and a late half for every complaint would say nothing new.
    """
    result = feedback.result
    if result is None:
        return None
    if verdict is None:
        reward = grade(feedback)
        verdict = Verdict(reward, {} if reward is None else {"feedback": reward})
    terms = result.task.terms
    if feedback.source is not terms.rl and (verdict.reward is None or named(terms, feedback.source)):
        return None
    return Score(
        score_id=derived_id("score", result.result_id, scorer, feedback.feedback_id),
        event_time=appended,
        opened_at=opened_at(result, appended),
        sample=sample_of(result),
        source=feedback.source,
        scorer=scorer,
        feedback_id=feedback.feedback_id,
        task_at=result.opened_at,
        **_said(verdict),
    )


# --- shell ------------------------------------------------------------------------------------------------------------


class Scoring:
    """The application; see the module's text.

    Args:
        judging: gives the verdicts.
        pairing: for feedback without its result; without one such feedback is skipped.
        grades: for rewards that have grades of other sources for parts; without one these are missing.
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
        # Of slow scorers, by result, scorer and feedback.
        self._verdicts = Answers[tuple[str, str, str | None], Verdict](self._judging.limits.at_once)
        self._pairing, self._grades = pairing, grades
        self.table: str | None = None if pairing is None and grades is None else TABLE
        self.skipped = Skipped()

    @property
    def steps(self) -> int:
        """Slow calls, and votes within them, answered so far."""
        return sum(self._judging.ended.values()) + sum(_votes().values())

    def asking(self, partition: int) -> bool:
        """Whether a batch waits for slow calls."""
        return partition in self._verdicts.asking

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics."""
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.SKIPPED, lambda: self.skipped.count)
        exporter.read(metrics.JUDGE_CALLS, lambda: {(end,): count for end, count in self._judging.ended.items()})
        exporter.read(metrics.JUDGE_UNKNOWN, lambda: self._judging.unknown)
        exporter.read(metrics.JUDGE_VOTES, _votes)
        exporter.read(metrics.JUDGE_UNPARSABLE, _unparsable)
        measure_pairing(self._pairing, exporter)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Takes the recent results, waiting feedback and recent grades of a partition over."""
        graded = {key: value for key, value in entries.items() if key.startswith(PREFIX)}
        if self._grades is not None:
            self._grades.restore(partition, graded)
        if self._pairing is not None:
            self._pairing.restore(partition, {key: value for key, value in entries.items() if key not in graded})

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._verdicts.revoke(partition)
        if self._grades is not None:
            self._grades.revoke(partition)
        if self._pairing is not None:
            self._pairing.revoke(partition)

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Nothing beside the input."""
        return ()

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Whether feedback waits for a result that cannot come any more."""
        return self._pairing is not None and self._pairing.due(partition, at_end)

    async def expire(self, partition: int) -> Effects:
        """Waits for that no more."""
        effects = Effects()
        self._settle(partition, effects)
        return effects

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Opens and Scores of a batch of tasks, results or feedback, in the order of the input; slow verdicts are asked
        for many at once.

        Raises Retryable while a judge cannot be asked, or a record cannot be read again.
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
        # All that speaks of a task has its id for a key, and the samples of a task came in one trace.
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
                rewards.check(result.task)
                if result.task.terms.rl is Source.RESULT:
                    scored.append((result, record.timestamp, self._judging.at_once(result)))
            except INVALID as error:
                effects.dead.append(dead(record, error))
        slow = [
            ((result.result_id, rewards.scorer_name(result.task), None), partial(self._judging.slowly, result))
            for result, _, verdict in scored
            if verdict is None
        ]
        later = iter(await self._verdicts.ask(partition, slow))
        return [
            score_of_result(result, verdict or next(later), rewards.scorer_name(result.task), appended)
            for result, appended, verdict in scored
        ]

    def _opened(self, records: Sequence[LogRecord], effects: Effects) -> list[Open]:
        found: list[Open] = []
        for record in records:
            try:
                task = decoded(self._codec, record, Task)
                rewards.check(task)
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
        """The halves of feedback with its result."""
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
        (scorer, kind): count for scorer, tally in rewards.tallies().items() for kind, count in tally.counts.items()
    }


def _unparsable() -> dict[tuple[str, ...], float]:
    return {(scorer,): tally.unparsable_ratio for scorer, tally in rewards.tallies().items()}


def build(settings: Settings, *, feedback_horizon_ms: int = HORIZON_MS) -> Scoring:
    """The application for a process: with the codec that the settings ask for, and the scorers of installed packages.

    Args:
        feedback_horizon_ms: how far feedback and the result it speaks of may be apart; 0: feedback carries its result.
    """
    from tentalis.kafka import make_codec

    rewards.load_plugins()
    codec = make_codec(settings, patience=0.0)
    if not feedback_horizon_ms:
        return Scoring(codec)
    reader = KafkaLogReader(settings)
    pairing = Pairing(codec, reader, feedback_horizon_ms)
    return Scoring(codec, pairing=pairing, grades=Grades(codec, reader, feedback_horizon_ms))
