"""Hinting: feedback becomes the OPD half, a hint and the teacher's log-probs of the student's own tokens.

| feedback | Hint |
|---|---|
| from the hint's source, without a hint (no text, praise, evidence, none found) | `none`, without tokens |
| from the hint's source, with a hint | `accepted`, with the teacher's log-probs |
| from the hint's source, answer not trainable or hints not teachable (below) | `rejected`, without tokens |
| from a source that the terms do not name, with an accepted hint | `accepted`: a late half |
| from any other source | no Hint |

The hinter is set per environment (`tentalis.opd.hinters`, docs/concepts/hints.md): a rule, a judge model, or none.

Not trainable: a failed or empty answer, or one without a meaningful importance ratio (greedy, truncated or constrained
sampling); no hinter is called for it. Not teachable: a call that the server refuses because of its content (longer than
its context, a temperature it cannot score at), or scores that are not one finite number per token.

The batch waits for a server or judge that is unreachable, does not know the model or refuses requests for now; a call
that fails otherwise is tried a few times. A retried batch makes only the calls without an answer (`call_cache`): a
failure of the teacher does not repeat the call to the judge.

Feedback that names only a task is paired with its results (`streams.fold.pairing`, docs/concepts/feedback.md). Feedback
for which no result came makes no half: it is counted. It is not a dead letter, since nothing is wrong with it.

Owner of the dead letters of feedback: records that cannot be read, or on which the server fails every time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from schemas import topics
from schemas.records import Feedback, Hint, HintKind, Result, not_trainable_by_ratio, sample_of
from schemas.wire.codec import Codec
from streams.apps.hinting import metrics
from streams.apps.hinting.core import answers, hint_half, silence
from streams.fold.halves import named
from streams.fold.pairing import HORIZON_MS, TABLE, Paired, Pairing, carried, make_pairing, measure_pairing, said_in
from streams.fold.teacher_calls import AT_ONCE, retry_of
from streams.runtime.call_cache import CallCache, CallSlots
from streams.runtime.decoding import Skipped, dead, output
from streams.runtime.metrics import STREAM_DECODE_SECONDS
from streams.runtime.processor import Dead, Effects, LogRecord, OutputRecord, Retryable
from tentalis.inference.protocol import InferenceError
from tentalis.inference.replicas.metrics import export_replicas
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.kafka import topology
from tentalis.opd import Hinter, HintProposal, RuleHinter, Teacher, TeacherRefused
from tentalis.opd.config import ANY_ENVIRONMENT, Hinters
from tentalis.rewards.verdict import ScorerAway
from tentalis.service import tracing
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

APP_ID = topology.named("hinting").app_id
UNTRAINABLE = "untrainable"
TRIES = 5
"""Failures of a server on one record (5xx) after which the record is a dead letter."""


class NoResult(Exception):
    """Feedback that names a task, carries no result and has none within the horizon: there are no tokens to score."""


class Hinting:
    """The application; see the module docstring.

    Args:
        hinters: by environment; `*` for all others.
        pairing: finds the results of feedback that carries none; without pairing such feedback makes no half.
        at_once: the most calls to the teacher in flight, and the most to judges.
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
        routers: Sequence[ReplicaRouter] = (),
    ) -> None:
        """`routers`: of the replicas that the teacher asks."""
        self._routers = routers
        self._codec = codec
        self._teacher = teacher
        self._hinters: Mapping[str, Hinter] = {ANY_ENVIRONMENT: RuleHinter()} if hinters is None else hinters
        self._pairing = pairing
        # By offset of the feedback and result id: the hints proposed, and the half or dead letter with its trace.
        self._proposals = CallCache[tuple[int, str], HintProposal](at_once)
        self._answers = CallCache[tuple[int, str], tuple[Hint | Dead | None, str | None]](at_once)
        self._hints = dict.fromkeys((HintKind.ACCEPTED, HintKind.REJECTED, HintKind.NONE), 0)
        self._without: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._votes: Counter[str] = Counter()
        self._failures: Counter[tuple[int, int, str]] = Counter()
        self.unanswered = Skipped()
        """Feedback for which no result came."""
        self.steps = 0
        """Judge calls and teacher calls answered so far."""
        if pairing is None:
            self.topics = (topics.FEEDBACK,)
        self.table: str | None = None if pairing is None else TABLE

    def asking(self, partition: int) -> bool:
        """Returns true if a batch waits for judges or the teacher."""
        return partition in self._proposals.asking | self._answers.asking

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the application."""
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        export_replicas(exporter, self._routers)
        exporter.read(metrics.HINTS, lambda: {(kind.value,): count for kind, count in self._hints.items()})
        exporter.read(metrics.HINTS_NONE, lambda: {(reason,): count for reason, count in self._without.items()})
        exporter.read(metrics.HINTS_REJECTED, lambda: {(reason,): count for reason, count in self._rejected.items()})
        exporter.read(metrics.HINTS_NO_RESULT, lambda: self.unanswered.count)
        exporter.read(metrics.HINT_VOTES, lambda: {(said,): count for said, count in self._votes.items()})
        measure_pairing(self._pairing, exporter)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores the recent results and waiting feedback of a partition."""
        if self._pairing is not None:
            self._pairing.restore(partition, entries)

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._proposals.revoke(partition)
        self._answers.revoke(partition)
        if self._pairing is not None:
            self._pairing.revoke(partition)

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns nothing: all output comes from input."""
        return ()

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Returns true if feedback waits for a result that can no longer come."""
        return self._pairing is not None and self._pairing.due(partition, at_end)

    async def expire(self, partition: int) -> Effects:
        """Gives up the feedback for which no result came."""
        effects = Effects()
        await self._settle(partition, effects)
        return effects

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Returns the Hints of a batch of feedback, or of results for which feedback waits, in the order of the input;
        the teacher is called concurrently.

        Raises:
            Retryable: a judge or the teacher is unavailable, or a record cannot be read again.
            OtherTokenizer: the tokenizers of teacher and student differ.
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
        """Returns the feedback of a batch, paired with its results."""

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
            "known; if there is one, send the feedback again with its result"
        )
        self.unanswered.add(record, error)

    def _wanted(self, paired: Paired) -> bool:
        """Returns true if the feedback may make a half, including a late half if the terms do not name its source."""
        feedback, result = paired.feedback, paired.result
        return answers(feedback, result) or not named(result.task.terms, feedback.source)

    def _hinter(self, result: Result) -> Hinter:
        return self._hinters.get(result.task.environment) or self._hinters[ANY_ENVIRONMENT]

    async def _proposed(self, paired: Paired, turns: CallSlots) -> HintProposal:
        feedback, result = paired.feedback, paired.result
        reason = silence(feedback)
        if reason is None and (untrainable := not_trainable_by_ratio(sample_of(result))) is not None:
            log.warning("no hint for result %s of task %s: %s", result.result_id, feedback.task_id, untrainable)
            reason = UNTRAINABLE
        if reason is not None:
            return HintProposal(reason=reason)
        try:
            async with turns:
                proposal = await self._hinter(result).propose(feedback, result)
        except ScorerAway as error:
            raise Retryable(f"the hint judge is unavailable: {error}") from error
        self.steps += bool(proposal.votes)
        self._votes.update({said.value: count for said, count in proposal.votes.items()})
        return proposal

    async def _traced(
        self, paired: Paired, proposal: HintProposal, turns: CallSlots
    ) -> tuple[Hint | Dead | None, str | None]:
        parent = tracing.continued(paired.record.headers, paired.record.key)
        with tracing.span("hint", parent=parent) as span:
            return await self._hint(paired, proposal, turns), span.traceparent

    async def _hint(self, paired: Paired, proposal: HintProposal, turns: CallSlots) -> Hint | Dead | None:
        feedback, result = paired.feedback, paired.result
        try:
            hint = await self._half(paired, proposal, turns)
        except InferenceError as error:
            if (retry := retry_of(error)) is not None:
                raise retry from error
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

    async def _half(self, paired: Paired, proposal: HintProposal, turns: CallSlots) -> Hint:
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
    """Builds the application of a process.

    Args:
        server: URL of the student's inference server.
        hinters: configuration of hinters and teacher.
        feedback_horizon_ms: the longest time between feedback and its result; 0: feedback carries its result.
    Raises:
        OtherTokenizer: a separate teacher has another tokenizer than the student.
        NoApiKey: an environment variable that is configured for a key is not set.
    """
    from tentalis.kafka.codec import make_codec
    from tentalis.opd.wiring import check_teacher, make_hinters, make_teacher

    asyncio.run(check_teacher(hinters.teacher, server))
    codec = make_codec(settings, patience=0.0)
    pairing = make_pairing(settings, codec, feedback_horizon_ms)
    teacher = make_teacher(hinters.teacher, server)
    return Hinting(
        codec,
        teacher,
        hinters=make_hinters(hinters),
        pairing=pairing,
        at_once=at_once,
        routers=teacher.routers,
    )
