"""Scoring: tasks open, results and feedback become the RL half. Stateless.

| input | output |
|---|---|
| Task that opens at once | Open, opened at the task's append time |
| Result, the reward answers to the result | Score by the task's verifier, -1 if it failed; unknown is written too |
| Feedback, the reward answers to its source | Score of its grade; unknown is written too |
| Feedback from a source that the terms do not name at all | Score if it has a grade: a late half |
| Feedback on a task that opens with the first feedback | Open, opened at the feedback's append time |

Owner of the dead letters of tasks and results. Feedback that cannot be read, or has no result with it, is hinting's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.ids import derived_id
from schemas.records import Feedback, Open, Opens, Polarity, Record, Result, Score, Source, Task, Terms, sample_of
from streams.intake import KeyMismatch, Skipped, dead, decoded, output
from streams.processor import Effects, LogRecord, Output
from tentalis import rewards
from tentalis.config import Settings
from tentalis.rewards import RewardError, Verdict

APP_ID = "tentalis-scoring"
FEEDBACK_SCORER = "feedback/1"

_INVALID = (DecodeError, KeyMismatch, RewardError)

Judge = Callable[[Result], Awaitable[Verdict]]
"""The verdict on a result. Raises RewardError for a malformed task."""


# --- pure -------------------------------------------------------------------------------------------------------------


def opened_by_task(task: Task, appended: int) -> Open | None:
    """The Open of a task appended at `appended` (ms), None if it opens with its first feedback."""
    if task.terms.opens is not Opens.AT_ONCE:
        return None
    return Open(open_id=derived_id("open", task.task_id), event_time=appended, opened_at=appended, head=task.head)


def opened_by_feedback(feedback: Feedback, appended: int) -> Open | None:
    """The Open of a task that waits for its first feedback. Each feedback makes one, the join takes the first."""
    if feedback.result is None or feedback.result.task.terms.opens is not Opens.FIRST_FEEDBACK:
        return None
    task = feedback.result.task
    return Open(
        open_id=derived_id("open", task.task_id, feedback.feedback_id),
        event_time=appended,
        opened_at=appended,
        head=task.head,
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
        reward=verdict.reward,
        components=verdict.components,
        scorer=scorer,
    )


def grade(feedback: Feedback) -> float | None:
    """The reward in a feedback, [-1, 1]: 2 * score - 1, or the sign of its polarity, None if it has neither."""
    if feedback.score is not None:
        return 2.0 * feedback.score - 1.0
    return {Polarity.POSITIVE: 1.0, Polarity.NEGATIVE: -1.0}.get(feedback.polarity)


def named(terms: Terms, source: Source) -> bool:
    """Whether the terms wait for this source in any half."""
    return source in (terms.rl, terms.opd)


def score_of_feedback(feedback: Feedback, appended: int) -> Score | None:
    """The RL half that a feedback makes, None if it makes none or has no result with it.

    The source that the reward answers to always makes one. One that the terms name for the hint only makes none: its
    polarity is about the hint, and a late half for every complaint would say nothing new.
    """
    result = feedback.result
    if result is None:
        return None
    reward, terms = grade(feedback), result.task.terms
    if feedback.source is not terms.rl and (reward is None or named(terms, feedback.source)):
        return None
    return Score(
        score_id=derived_id("score", result.result_id, FEEDBACK_SCORER, feedback.feedback_id),
        event_time=appended,
        opened_at=opened_at(result, appended),
        sample=sample_of(result),
        source=feedback.source,
        reward=reward,
        components={} if reward is None else {"feedback": reward},
        scorer=FEEDBACK_SCORER,
        feedback_id=feedback.feedback_id,
    )


async def verdict_of(result: Result) -> Verdict:
    """The verdict of the task's verifier; a slow one runs in a thread. Raises RewardError."""
    verifier = rewards.verifier_of(result.task)
    if verifier is not None and verifier.slow:
        return await asyncio.to_thread(rewards.verify, result.task, result)
    return rewards.verify(result.task, result)


# --- shell ------------------------------------------------------------------------------------------------------------


class Scoring:
    """The application; see the module's text."""

    app_id = APP_ID
    topics = (topics.TASKS, topics.RESULTS, topics.FEEDBACK)
    table = None

    def __init__(self, codec: Codec, judge: Judge = verdict_of) -> None:
        self._codec = codec
        self._judge = judge
        self.skipped = Skipped()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Nothing to restore."""

    def revoke(self, partition: int) -> None:
        """Nothing to give up."""

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Nothing beside the input."""
        return ()

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Opens and Scores of a batch of tasks, results or feedback, in the order of the input."""
        effects = Effects()
        for record in records:
            try:
                halves = await self._halves(record)
            except _INVALID as error:
                if record.topic == topics.FEEDBACK:
                    self.skipped.add(record, error)
                else:
                    effects.dead.append(dead(record, error))
            else:
                effects.outputs += [output(self._codec, topics.HALVES, half, APP_ID) for half in halves]
        return effects

    async def _halves(self, record: LogRecord) -> list[Record]:
        made: list[Record | None]
        if record.topic == topics.TASKS:
            task = decoded(self._codec, record, Task)
            rewards.check(task)
            made = [opened_by_task(task, record.timestamp)]
        elif record.topic == topics.RESULTS:
            made = [await self._score(decoded(self._codec, record, Result), record.timestamp)]
        else:
            feedback = decoded(self._codec, record, Feedback)
            if feedback.result is not None:
                rewards.check_environment(feedback.result.task.environment)
            made = [
                opened_by_feedback(feedback, record.timestamp),
                score_of_feedback(feedback, record.timestamp),
            ]
        return [half for half in made if half is not None]

    async def _score(self, result: Result, appended: int) -> Score | None:
        rewards.check(result.task)
        if result.task.terms.rl is not Source.RESULT:
            return None
        verdict = await self._judge(result)
        return score_of_result(result, verdict, rewards.scorer_name(result.task), appended)


def build(settings: Settings) -> Scoring:
    """The application for a process: with the codec that the settings ask for."""
    from tentalis.kafka import make_codec

    return Scoring(make_codec(settings, patience=0.0))
