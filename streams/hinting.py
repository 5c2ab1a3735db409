"""Hinting: feedback becomes the OPD half, a hint and the teacher's log-probs of the student's own tokens.

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
asked again a few times. A batch that is tried again asks only for what it has no answer to (`streams.answers`).
Feedback that names a task and no more is paired with the results it speaks of (`streams.pairing`, docs/feedback.md).
Owner of the dead letters of feedback: what cannot be read, what no result came for (`no_result`), what the server fails
on every time.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.codec import Codec
from schemas.ids import derived_id
from schemas.records import Feedback, Hint, HintKind, Polarity, Result, not_trainable_by_ratio, sample_of
from streams.answers import Answers, Turns
from streams.intake import dead, output
from streams.pairing import HORIZON_MS, TABLE, Paired, Pairing, carried, make_pairing, measure_pairing, said_in
from streams.processor import Dead, Effects, LogRecord, Output, Retryable
from streams.scoring import named, opened_at
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable
from tentalis.metrics import Exporter
from tentalis.opd import RULE_HINTER, Taught, Teacher, TeacherRefused, rule_hint

log = logging.getLogger(__name__)

APP_ID = "tentalis-hinting"
AT_ONCE = 32
"""Calls to the teacher in flight, over all partitions: what the server can batch."""
TRIES = 5
"""Times that a server may fail on one record (5xx) before it is a dead letter."""

# Refusals that are about the server's state or configuration, not about a record: wait, and be seen to wait.
_LATER = frozenset({401, 403, 404, 408, 409, 425, 429, 502, 504})


class NoResult(Exception):
    """Feedback that names a task and carries no result, and no result came: there are no tokens to speak of."""


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
    taught: Taught | None = None,
) -> Hint:
    """The OPD half. Without what the teacher says the half has no tokens either."""
    sample = sample_of(result)
    return Hint(
        hint_id=derived_id("hint", result.result_id, RULE_HINTER, feedback.feedback_id),
        event_time=appended,
        opened_at=opened_at(result, appended),
        sample=sample if taught is not None else sample.without_tokens(),
        source=feedback.source,
        kind=kind,
        hints=() if hint is None else (hint,),
        teacher_policy=None if taught is None else taught.teacher,
        teacher_logprobs=None if taught is None else taught.logprobs,
        hinter=RULE_HINTER,
        feedback_id=feedback.feedback_id,
        topk=0 if taught is None else taught.topk,
        topk_ids=b"" if taught is None else taught.topk_ids,
        topk_logprobs=b"" if taught is None else taught.topk_logprobs,
        task_at=result.opened_at,
    )


# --- shell ------------------------------------------------------------------------------------------------------------


class Hinting:
    """The application; see the module's text.

    Args:
        pairing: for feedback without its result; without one such feedback is a dead letter.
        at_once: most calls to the teacher in flight.
    """

    app_id = APP_ID
    topics: tuple[str, ...] = (topics.RESULTS, topics.FEEDBACK)

    def __init__(
        self, codec: Codec, teacher: Teacher, *, pairing: Pairing | None = None, at_once: int = AT_ONCE
    ) -> None:
        self._codec = codec
        self._teacher = teacher
        self._pairing = pairing
        # By offset of the feedback and result: what is made of them, and its trace.
        self._answers = Answers[tuple[int, str], tuple[Hint | Dead | None, str | None]](at_once)
        self._hints = dict.fromkeys((HintKind.ACCEPTED, HintKind.REJECTED, HintKind.NONE), 0)
        self._failures: Counter[tuple[int, int, str]] = Counter()
        self.steps = 0
        """Calls to the teacher answered so far."""
        if pairing is None:
            self.topics = (topics.FEEDBACK,)
        self.table: str | None = None if pairing is None else TABLE

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics."""
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.HINTS, lambda: {(kind.value,): count for kind, count in self._hints.items()})
        measure_pairing(self._pairing, exporter)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Takes the recent results and waiting feedback of a partition over."""
        if self._pairing is not None:
            self._pairing.restore(partition, entries)

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._answers.revoke(partition)
        if self._pairing is not None:
            self._pairing.revoke(partition)

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Nothing beside the input."""
        return ()

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Whether feedback waits for a result that cannot come any more."""
        return self._pairing is not None and self._pairing.due(partition, at_end)

    async def expire(self, partition: int) -> Effects:
        """Dead letters of the feedback for which no result came."""
        effects = Effects()
        await self._settle(partition, effects)
        return effects

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Hints of a batch of feedback, or of results that feedback waits for, in the order of the input; the teacher
        is asked for many at once.

        Raises Retryable while the teacher cannot be asked, or a record cannot be read again.
        """
        with self._answers.batch(partition, records):
            return await self._process(partition, records)

    async def _process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        effects = Effects()
        if self._pairing is not None and records[0].topic == topics.RESULTS:
            pairs = await self._pairing.with_results(partition, records)
        else:
            pairs = await self._feedback(partition, records, effects)
        questions = [
            ((paired.record.offset, paired.result.result_id), partial(self._traced, paired)) for paired in pairs
        ]
        made = await self._answers.ask(partition, questions)
        for each, traceparent in made:
            if isinstance(each, Dead):
                effects.dead.append(each)
            elif each is not None:
                effects.outputs.append(output(self._codec, topics.HALVES, each, APP_ID, traceparent))
        await self._settle(partition, effects)
        for each, _ in made:
            if isinstance(each, Hint):
                self._hints[each.kind] += 1
        return effects

    async def _settle(self, partition: int, effects: Effects) -> None:
        if self._pairing is None:
            return
        gone = self._pairing.dispose(partition)
        for record, feedback in await self._pairing.unanswered(partition, gone):
            effects.dead.append(_no_result(record, feedback))
        effects.changes = self._pairing.changes(partition)

    async def _feedback(self, partition: int, records: Sequence[LogRecord], effects: Effects) -> list[Paired]:
        """A batch of feedback, each with the results that it speaks of."""

        def refuse(record: LogRecord, error: Exception) -> None:
            effects.dead.append(dead(record, error))

        said = said_in(self._codec, self._pairing, partition, records, refuse)
        if self._pairing is None:
            pairs, too_late = carried(said), [each for each in said if each[1].result is None]
        else:
            pairs, too_late = await self._pairing.with_feedback(partition, said, records)
        effects.dead += [_no_result(record, feedback) for record, feedback in too_late]
        return pairs

    async def _traced(self, paired: Paired, turns: Turns) -> tuple[Hint | Dead | None, str | None]:
        parent = tracing.continued(paired.record.headers, paired.record.key)
        with tracing.span("hint", parent=parent) as span:
            return await self._hint(paired, turns), span.traceparent

    async def _hint(self, paired: Paired, turns: Turns) -> Hint | Dead | None:
        feedback, result = paired.feedback, paired.result
        if not answers(feedback, result) and named(result.task.terms, feedback.source):
            return None
        try:
            hint = await self._half(feedback, result, paired.record.timestamp, turns)
        except ServerUnavailable as error:
            raise Retryable(f"the teacher is away: {error}") from error
        except RequestRefused as error:
            if error.status in _LATER:
                raise Retryable(f"the teacher cannot be asked now: {error}") from error
            return self._failed(paired.record, result, error)
        except InferenceError as error:
            return self._failed(paired.record, result, error)
        self._failures.pop(_place(paired.record, result), None)
        return hint if answers(feedback, result) or hint.kind is HintKind.ACCEPTED else None

    def _failed(self, record: LogRecord, result: Result, error: InferenceError) -> Dead:
        place = _place(record, result)
        self._failures[place] += 1
        if self._failures[place] < TRIES:
            raise Retryable(f"the teacher failed on {record}: {error}") from error
        del self._failures[place]
        return Dead.of(record, "process", error)

    async def _half(self, feedback: Feedback, result: Result, appended: int, turns: Turns) -> Hint:
        hint = hint_text(feedback)
        if hint is None:
            return hint_half(feedback, result, appended, kind=HintKind.NONE)
        sample = sample_of(result)
        try:
            reason = not_trainable_by_ratio(sample)
            if reason is not None:
                raise TeacherRefused(reason)
            async with turns:
                taught = await self._teacher.logprobs(sample, result.task.messages, hint)
                self.steps += 1
        except TeacherRefused as refusal:
            log.warning("hint rejected for result %s of task %s: %s", result.result_id, feedback.task_id, refusal)
            return hint_half(feedback, result, appended, kind=HintKind.REJECTED, hint=hint)
        return hint_half(feedback, result, appended, kind=HintKind.ACCEPTED, hint=hint, taught=taught)


def _place(record: LogRecord, result: Result) -> tuple[int, int, str]:
    return record.partition, record.offset, result.result_id


def _no_result(record: LogRecord, feedback: Feedback) -> Dead:
    what = "no result" if feedback.sample_index is None else f"no result of sample {feedback.sample_index}"
    error = NoResult(
        f"no_result: feedback {feedback.feedback_id} names task {feedback.task_id} and carries no result, and {what} "
        "of it is known; send it again with the Result it speaks of"
    )
    return Dead.of(record, "process", error)


def build(
    settings: Settings,
    *,
    server: str,
    teacher: str | None = None,
    top: int = 0,
    api_key: str | None = None,
    at_once: int = AT_ONCE,
    feedback_horizon_ms: int = HORIZON_MS,
) -> Hinting:
    """The application for a process.

    Args:
        server: URL of the inference server.
        teacher: model or adapter on it; default: the server's base model.
        top: likeliest tokens that the teacher is asked for at each token, for distillation over them.
        feedback_horizon_ms: how far feedback and the result it speaks of may be apart; 0: feedback carries its result.
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

    codec = make_codec(settings, patience=0.0)
    pairing = make_pairing(settings, codec, feedback_horizon_ms)
    return Hinting(codec, Teacher(client, given if teacher else base_model, top), pairing=pairing, at_once=at_once)
