"""Hinting: feedback becomes the OPD half, a hint and the teacher's log-probs of the student's own tokens.

| feedback | Hint |
|---|---|
| from the source that it answers to, nothing to say (no text, praise, evidence, no hint) | `none`, without tokens |
| from it, with a hint | `accepted`, with the teacher's log-probs |
| from it, on an answer not to be learnt from, or with hints not to be taught (below) | `rejected`, without tokens |
| from a source that the terms do not name at all, with an accepted hint | `accepted`: a late half |
| from any other | no Hint |

Who finds the hints is set per environment (`tentalis.opd.hinters`, docs/hints.md): a rule, a judge model, or nobody.

Not to be learnt from: a failed or empty answer, one whose importance ratio has no meaning (greedy, truncated or
constrained sampling); no hinter is asked about it. Not to be taught: a call that the server refuses for what is in it
(longer than its context, a temperature it cannot score at), scores that are not one finite number per token.

A server or judge that is away, does not know the model or wants no requests now is waited for; one that fails on a call
is asked again a few times. A batch that is tried again asks only for what it has no answer to (`streams.answers`), and
a judge no second time because the teacher failed.
Feedback that names a task and no more is paired with the results it speaks of (`streams.pairing`, docs/feedback.md); of
what no result came for nothing can be made: it is counted, and no dead letter, since nothing is wrong with it.
Owner of the dead letters of feedback: what cannot be read, what the server fails on every time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.codec import Codec
from schemas.ids import derived_id
from schemas.records import Feedback, Hint, HintKind, Polarity, Result, not_trainable_by_ratio, sample_of
from streams.answers import Answers, Turns
from streams.intake import Skipped, dead, output
from streams.pairing import HORIZON_MS, TABLE, Paired, Pairing, carried, make_pairing, measure_pairing, said_in
from streams.processor import Dead, Effects, LogRecord, Output, Retryable
from streams.scoring import named, opened_at
from tentalis import metrics, tracing
from tentalis.config import Settings
from tentalis.inference.protocol import InferenceError, RequestRefused, ServerUnavailable
from tentalis.metrics import Exporter
from tentalis.opd import Hinter, Proposal, RuleHinter, Taught, Teacher, TeacherRefused
from tentalis.opd.config import ANY, Hinters
from tentalis.opd.hinters import EVIDENCE, NOTHING_SAID, PRAISE
from tentalis.rewards import ScorerAway
from tentalis.signals import from_signal

log = logging.getLogger(__name__)

APP_ID = "tentalis-hinting"
AT_ONCE = 32
"""Calls to the teacher in flight, over all partitions: what the server can batch. And as many questions to judges."""
UNTRAINABLE = "untrainable"
TRIES = 5
"""Times that a server may fail on one record (5xx) before it is a dead letter."""

LATER = frozenset({401, 403, 404, 408, 409, 425, 429, 502, 504})
"""Refusals that are about the server's state or configuration, not about a record: wait, and be seen to wait."""


class NoResult(Exception):
    """Feedback that names a task and carries no result, and no result came: there are no tokens to speak of."""


# --- pure -------------------------------------------------------------------------------------------------------------


def answers(feedback: Feedback, result: Result) -> bool:
    """Whether the OPD half answers to this feedback's source."""
    return feedback.source is result.task.terms.opd


def silence(feedback: Feedback) -> str | None:
    """Why a feedback says nothing to do otherwise, None if it may. Praise is no hint, however long, and the evidence of
    a signal none, however it reads: a tool may have written it."""
    if from_signal(feedback):
        return EVIDENCE
    if feedback.polarity is Polarity.POSITIVE:
        return PRAISE
    return None if feedback.text.strip() else NOTHING_SAID


def hint_half(
    feedback: Feedback,
    result: Result,
    appended: int,
    *,
    hinter: str,
    kind: HintKind,
    hints: tuple[str, ...] = (),
    taught: Taught | None = None,
) -> Hint:
    """The OPD half. Without what the teacher says the half has no tokens either; with it, its hints are those that were
    taught, and the teacher's log-probs those under the first of them."""
    sample = sample_of(result)
    return Hint(
        hint_id=derived_id("hint", result.result_id, hinter, feedback.feedback_id),
        event_time=appended,
        opened_at=opened_at(result, appended),
        sample=sample if taught is not None else sample.without_tokens(),
        source=feedback.source,
        kind=kind,
        hints=hints if taught is None else taught.hints,
        teacher_policy=None if taught is None else taught.teacher,
        teacher_logprobs=None if taught is None else taught.logprobs,
        hinter=hinter,
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
        hinters: by environment, `*` for those that are not named.
        pairing: for feedback without its result; without one nothing comes of such feedback.
        at_once: most calls to the teacher in flight, and most questions to judges.
    """

    app_id = APP_ID
    topics: tuple[str, ...] = (topics.RESULTS, topics.FEEDBACK)

    def __init__(
        self,
        codec: Codec,
        teacher: Teacher,
        *,
        hinters: Mapping[str, Hinter] | None = None,
        pairing: Pairing | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        self._codec = codec
        self._teacher = teacher
        self._hinters: Mapping[str, Hinter] = {ANY: RuleHinter()} if hinters is None else hinters
        self._pairing = pairing
        # By offset of the feedback and result: the hints in it; and what is made of them, with its trace.
        self._proposals = Answers[tuple[int, str], Proposal](at_once)
        self._answers = Answers[tuple[int, str], tuple[Hint | Dead | None, str | None]](at_once)
        self._hints = dict.fromkeys((HintKind.ACCEPTED, HintKind.REJECTED, HintKind.NONE), 0)
        self._without: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._votes: Counter[str] = Counter()
        self._failures: Counter[tuple[int, int, str]] = Counter()
        self.unanswered = Skipped()
        """Feedback for which no result came."""
        self.steps = 0
        """Questions to judges and calls to the teacher answered so far."""
        if pairing is None:
            self.topics = (topics.FEEDBACK,)
        self.table: str | None = None if pairing is None else TABLE

    def asking(self, partition: int) -> bool:
        """Whether a batch waits for judges or the teacher."""
        return partition in self._proposals.asking | self._answers.asking

    def measure(self, exporter: Exporter) -> None:
        """Its own metrics."""
        exporter.read(metrics.STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(metrics.HINTS, lambda: {(kind.value,): count for kind, count in self._hints.items()})
        exporter.read(metrics.HINTS_NONE, lambda: {(reason,): count for reason, count in self._without.items()})
        exporter.read(metrics.HINTS_REJECTED, lambda: {(reason,): count for reason, count in self._rejected.items()})
        exporter.read(metrics.HINTS_NO_RESULT, lambda: self.unanswered.count)
        exporter.read(metrics.HINT_VOTES, lambda: {(said,): count for said, count in self._votes.items()})
        measure_pairing(self._pairing, exporter)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Takes the recent results and waiting feedback of a partition over."""
        if self._pairing is not None:
            self._pairing.restore(partition, entries)

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._proposals.revoke(partition)
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
        """Gives up the feedback for which no result came."""
        effects = Effects()
        await self._settle(partition, effects)
        return effects

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Hints of a batch of feedback, or of results that feedback waits for, in the order of the input; the teacher
        is asked for many at once.

        Raises:
            Retryable: a judge or the teacher cannot be asked now, or a record cannot be read again.
            OtherTokenizer: the teacher's tokens are not the student's.
        """
        with self._proposals.batch(partition, records), self._answers.batch(partition, records):
            return await self._process(partition, records)

    async def _process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        effects = Effects()
        if self._pairing is not None and records[0].topic == topics.RESULTS:
            pairs = await self._pairing.with_results(partition, records)
        else:
            pairs = await self._feedback(partition, records, effects)
        wanted = [paired for paired in pairs if self._wanted(paired)]
        keys = [(paired.record.offset, paired.result.result_id) for paired in wanted]
        asked = zip(keys, [partial(self._proposed, paired) for paired in wanted], strict=True)
        proposals = await self._proposals.ask(partition, list(asked))
        questions = [
            (key, partial(self._traced, paired, proposal))
            for key, paired, proposal in zip(keys, wanted, proposals, strict=True)
        ]
        made = await self._answers.ask(partition, questions)
        for each, traceparent in made:
            if isinstance(each, Dead):
                effects.dead.append(each)
            elif each is not None:
                effects.outputs.append(output(self._codec, topics.HALVES, each, APP_ID, traceparent))
        await self._settle(partition, effects)
        for (each, _), proposal in zip(made, proposals, strict=True):
            if isinstance(each, Hint):
                self._hints[each.kind] += 1
                self._without[proposal.reason] += each.kind is HintKind.NONE
        return effects

    async def _settle(self, partition: int, effects: Effects) -> None:
        if self._pairing is None:
            return
        gone = self._pairing.dispose(partition)
        for record, feedback in await self._pairing.unanswered(partition, gone):
            self._give_up(record, feedback)
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
        for record, feedback in too_late:
            self._give_up(record, feedback)
        return pairs

    def _give_up(self, record: LogRecord, feedback: Feedback) -> None:
        what = "no result" if feedback.sample_index is None else f"no result of sample {feedback.sample_index}"
        error = NoResult(
            f"feedback {feedback.feedback_id} names task {feedback.task_id} and carries no result, and {what} of it is "
            "known; if there is one, send it again with that"
        )
        self.unanswered.add(record, error)

    def _wanted(self, paired: Paired) -> bool:
        """Whether anything becomes of it: also a late half, where the terms do not name the source at all."""
        feedback, result = paired.feedback, paired.result
        return answers(feedback, result) or not named(result.task.terms, feedback.source)

    def _hinter(self, result: Result) -> Hinter:
        return self._hinters.get(result.task.environment) or self._hinters[ANY]

    async def _proposed(self, paired: Paired, turns: Turns) -> Proposal:
        feedback, result = paired.feedback, paired.result
        reason = silence(feedback)
        if reason is None and (untrainable := not_trainable_by_ratio(sample_of(result))) is not None:
            log.warning("no hint for result %s of task %s: %s", result.result_id, feedback.task_id, untrainable)
            reason = UNTRAINABLE
        if reason is not None:
            return Proposal(reason=reason)
        try:
            async with turns:
                proposal = await self._hinter(result).propose(feedback, result)
        except ScorerAway as error:
            raise Retryable(f"the hint judge cannot be asked: {error}") from error
        self.steps += bool(proposal.votes)
        self._votes.update({said.value: count for said, count in proposal.votes.items()})
        return proposal

    async def _traced(self, paired: Paired, proposal: Proposal, turns: Turns) -> tuple[Hint | Dead | None, str | None]:
        parent = tracing.continued(paired.record.headers, paired.record.key)
        with tracing.span("hint", parent=parent) as span:
            return await self._hint(paired, proposal, turns), span.traceparent

    async def _hint(self, paired: Paired, proposal: Proposal, turns: Turns) -> Hint | Dead | None:
        feedback, result = paired.feedback, paired.result
        try:
            hint = await self._half(paired, proposal, turns)
        except ServerUnavailable as error:
            raise Retryable(f"the teacher is away: {error}") from error
        except RequestRefused as error:
            if error.status in LATER:
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

    async def _half(self, paired: Paired, proposal: Proposal, turns: Turns) -> Hint:
        feedback, result = paired.feedback, paired.result
        half = partial(
            hint_half, feedback, result, paired.record.timestamp, hinter=self._hinter(result).name, hints=proposal.hints
        )
        if proposal.reason == UNTRAINABLE:
            self._rejected[UNTRAINABLE] += 1
            return half(kind=HintKind.REJECTED)
        if not proposal.hints:
            return half(kind=HintKind.NONE)
        try:
            async with turns:
                taught = await self._teacher.logprobs(sample_of(result), result.task, proposal.hints)
                self.steps += 1
        except TeacherRefused as refusal:
            log.warning("hint rejected for result %s of task %s: %s", result.result_id, feedback.task_id, refusal)
            self._rejected[refusal.reason] += 1
            return half(kind=HintKind.REJECTED)
        return half(kind=HintKind.ACCEPTED, taught=taught)


def _place(record: LogRecord, result: Result) -> tuple[int, int, str]:
    return record.partition, record.offset, result.result_id


def build(
    settings: Settings,
    *,
    server: str,
    hinters: Hinters,
    at_once: int = AT_ONCE,
    feedback_horizon_ms: int = HORIZON_MS,
) -> Hinting:
    """The application for a process.

    Args:
        server: URL of the student's inference server.
        hinters: who makes hints, and who teaches.
        feedback_horizon_ms: how far feedback and the result it speaks of may be apart; 0: feedback carries its result.
    Raises:
        OtherTokenizer: a teacher elsewhere has another tokenizer than the student.
        NoApiKey: an environment variable that is named for a key is not set.
    """
    from tentalis.kafka import make_codec
    from tentalis.opd.wiring import look_at_teacher, make_hinters, make_teacher

    asyncio.run(look_at_teacher(hinters.teacher, server))
    codec = make_codec(settings, patience=0.0)
    pairing = make_pairing(settings, codec, feedback_horizon_ms)
    teacher = make_teacher(hinters.teacher, server)
    return Hinting(codec, teacher, hinters=make_hinters(hinters), pairing=pairing, at_once=at_once)
