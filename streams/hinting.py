"""Hinting: feedback becomes the OPD half, a hint and the teacher's log-probs of the student's own tokens. Stateless.

| feedback | Hint |
|---|---|
| from the source that the hint answers to, nothing to say (no text, too short, praise) | `none`, without tokens |
| from it, with a hint | `accepted`, with the teacher's log-probs |
| from it, with a hint that cannot be learnt from (below) | `rejected`, hint kept, without tokens and log-probs |
| from a source that the terms do not name at all, with an accepted hint | `accepted`: a late half |
| from any other | no Hint |

Not to be learnt from: a failed or empty answer, one whose importance ratio has no meaning (greedy, truncated or
constrained sampling), a call that the server refuses for what is in it (longer than its context, a temperature it
cannot score at), scores that are not one finite number per token.

A server that is away, does not know the teacher or wants no requests now is waited for; one that fails on a call is
asked again a few times. Owner of the dead letters of feedback: what cannot be read, what has no result with it
(`no_result`), what the server fails on every time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.ids import derived_id
from schemas.records import Feedback, Hint, HintKind, Polarity, Result, not_trainable_by_ratio, sample_of
from streams.intake import KeyMismatch, dead, decoded, output
from streams.processor import Dead, Effects, LogRecord, Output, Retryable
from streams.scoring import named, opened_at
from tentalis import rewards
from tentalis.config import Settings
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable
from tentalis.opd import RULE_HINTER, Teacher, TeacherRefused, rule_hint
from tentalis.rewards import RewardError

log = logging.getLogger(__name__)

APP_ID = "tentalis-hinting"
AT_ONCE = 32
"""Calls to the teacher in flight, over all partitions: what the server can batch."""
TRIES = 5
"""Times that a server may fail on one record (5xx) before it is a dead letter."""

_INVALID = (DecodeError, KeyMismatch, RewardError)
# Refusals that are about the server's state or configuration, not about a record: wait, and be seen to wait.
_LATER = frozenset({401, 403, 404, 408, 409, 425, 429, 502, 504})


class NoResult(Exception):
    """Feedback that names a task and carries no result: there are no tokens to speak of."""


# --- pure -------------------------------------------------------------------------------------------------------------


def answers(feedback: Feedback, result: Result) -> bool:
    """Whether the OPD half answers to this feedback's source."""
    return feedback.source is result.task.terms.opd


def hint_text(feedback: Feedback) -> str | None:
    """The hint in a feedback, None if it says nothing to do otherwise. Praise is no hint, however long."""
    return None if feedback.polarity is Polarity.POSITIVE else rule_hint(feedback.text)


def hint_half(
    feedback: Feedback,
    result: Result,
    appended: int,
    *,
    kind: HintKind,
    hint: str | None = None,
    teacher: tuple[str, bytes] | None = None,
) -> Hint:
    """The OPD half. `teacher`: its name and float32[n] log-probs as bytes; without it the half has no tokens either."""
    sample = sample_of(result)
    return Hint(
        hint_id=derived_id("hint", result.result_id, RULE_HINTER, feedback.feedback_id),
        event_time=appended,
        opened_at=opened_at(result, appended),
        sample=sample if teacher is not None else sample.without_tokens(),
        source=feedback.source,
        kind=kind,
        hints=() if hint is None else (hint,),
        teacher_policy=None if teacher is None else teacher[0],
        teacher_logprobs=None if teacher is None else teacher[1],
        hinter=RULE_HINTER,
        feedback_id=feedback.feedback_id,
    )


# --- shell ------------------------------------------------------------------------------------------------------------


class Hinting:
    """The application; see the module's text.

    Args:
        at_once: most calls to the teacher in flight.
    """

    app_id = APP_ID
    topics = (topics.FEEDBACK,)
    table = None

    def __init__(self, codec: Codec, teacher: Teacher, *, at_once: int = AT_ONCE) -> None:
        self._codec = codec
        self._teacher = teacher
        self._slots = asyncio.Semaphore(at_once)
        self._failures: Counter[tuple[int, int]] = Counter()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Nothing to restore."""

    def revoke(self, partition: int) -> None:
        """Nothing to give up."""

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Nothing beside the input."""
        return ()

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Hints of a batch of feedback, in the order of the input; the teacher is asked for many at once.

        Raises Retryable while the teacher cannot be asked.
        """
        made = await _together([self._hint(record) for record in records])
        effects = Effects()
        for each in made:
            if isinstance(each, Dead):
                effects.dead.append(each)
            elif each is not None:
                effects.outputs.append(output(self._codec, topics.HALVES, each, APP_ID))
        return effects

    async def _hint(self, record: LogRecord) -> Hint | Dead | None:
        try:
            feedback = decoded(self._codec, record, Feedback)
            result = feedback.result
            if result is None:
                raise NoResult(
                    f"no_result: feedback {feedback.feedback_id} names task {feedback.task_id} and carries no result; "
                    "send it again with the Result it speaks of"
                )
            rewards.check_environment(result.task.environment)
        except _INVALID as error:
            return dead(record, error)
        except NoResult as error:
            return Dead.of(record, "process", error)
        if not answers(feedback, result) and named(result.task.terms, feedback.source):
            return None
        try:
            hint = await self._half(feedback, result, record.timestamp)
        except ServerUnavailable as error:
            raise Retryable(f"the teacher is away: {error}") from error
        except RequestRefused as error:
            if error.status in _LATER:
                raise Retryable(f"the teacher cannot be asked now: {error}") from error
            return self._failed(record, error)
        except InferenceError as error:
            return self._failed(record, error)
        self._failures.pop((record.partition, record.offset), None)
        return hint if answers(feedback, result) or hint.kind is HintKind.ACCEPTED else None

    def _failed(self, record: LogRecord, error: InferenceError) -> Dead:
        place = (record.partition, record.offset)
        self._failures[place] += 1
        if self._failures[place] < TRIES:
            raise Retryable(f"the teacher failed on {record}: {error}") from error
        del self._failures[place]
        return Dead.of(record, "process", error)

    async def _half(self, feedback: Feedback, result: Result, appended: int) -> Hint:
        hint = hint_text(feedback)
        if hint is None:
            return hint_half(feedback, result, appended, kind=HintKind.NONE)
        sample = sample_of(result)
        try:
            reason = not_trainable_by_ratio(sample)
            if reason is not None:
                raise TeacherRefused(reason)
            async with self._slots:
                teacher = await self._teacher.logprobs(sample, result.task.messages, hint)
        except TeacherRefused as refusal:
            log.warning("hint rejected for result %s of task %s: %s", result.result_id, feedback.task_id, refusal)
            return hint_half(feedback, result, appended, kind=HintKind.REJECTED, hint=hint)
        return hint_half(feedback, result, appended, kind=HintKind.ACCEPTED, hint=hint, teacher=teacher)


async def _together(calls: Sequence[Awaitable[Hint | Dead | None]]) -> list[Hint | Dead | None]:
    """The answers in order. The first failure cancels what is still under way, and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def build(
    settings: Settings, *, server: str, teacher: str | None = None, api_key: str | None = None, at_once: int = AT_ONCE
) -> Hinting:
    """The application for a process.

    Args:
        server: URL of the inference server.
        teacher: model or adapter on it; default: the server's base model.
    """
    from tentalis.inference.client import OpenAIClient
    from tentalis.kafka import make_codec

    client = OpenAIClient(server, api_key)

    async def base_model() -> str:
        cards = await client.models()
        bases = [str(card["id"]) for card in cards if not card.get("parent")]
        if not bases:
            raise ServerUnavailable(f"{server} lists no base model")
        return bases[0]

    async def given() -> str:
        return str(teacher)

    return Hinting(
        make_codec(settings, patience=0.0), Teacher(client, given if teacher else base_model), at_once=at_once
    )
