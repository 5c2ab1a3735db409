"""The OPD half, made from feedback, its result and the teacher's answer. Pure functions of one record."""

from schemas.ids import derived_id
from schemas.records import Feedback, Hint, HintKind, Polarity, Result, sample_of
from streams.fold.halves import opened_at
from tentalis.opd import TeacherScores
from tentalis.opd.hinters import EVIDENCE, NOTHING_SAID, PRAISE
from tentalis.signals import from_signal


def answers(feedback: Feedback, result: Result) -> bool:
    """Returns true if the OPD half comes from this feedback's source."""
    return feedback.source is result.task.terms.opd


def silence(feedback: Feedback) -> str | None:
    """Returns the reason why a feedback has no hint, None if it may have one. Praise is no hint, whatever its length,
    and the evidence of a signal is no hint, whatever its text: a tool may have written it."""
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
    taught: TeacherScores | None = None,
) -> Hint:
    """Returns the OPD half. Without `taught`, it has no tokens. With it, its hints are those that were taught, and the
    teacher's log-probs are those under the first hint."""
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
