"""Opens and RL halves, made from tasks, results, feedback and verdicts. Pure functions of one record."""

from schemas.ids import derived_id
from schemas.records import Feedback, Open, Opens, Score, Status, Task, sample_of
from streams.fold.halves import named, opened_at
from tentalis.rewards import registry
from tentalis.rewards.explicit import GRADERS, OverruledJudge, explicit_grade
from tentalis.rewards.grade import grade
from tentalis.rewards.score import verdict_fields
from tentalis.rewards.verdict import INFRASTRUCTURE_FAILED, FeedbackJudge, RewardError, Verdict

FEEDBACK_SCORER = "feedback/1"


def opened_by_task(task: Task, appended: int) -> Open | None:
    """Returns the Open of a task appended at `appended` (ms), None if the task opens with its first feedback."""
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
    """Returns the Open of a task that waits for its first feedback from a source of its terms. Each such feedback makes
    an Open; the join uses the first.

    Feedback from other sources makes none: a thumb on a turn would start the deadline before the next message is
    written.
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


def judge_of(feedback: Feedback) -> FeedbackJudge | None:
    """Returns the scorer that judges a feedback: the task's scorer, if the reward comes from this source and the scorer
    judges such feedback. None: the reward is the grade of the feedback.

    A grade in the feedback takes precedence, unless the scorer makes it a part of the reward.
    """
    result = feedback.result
    if result is None or feedback.source is not result.task.terms.rl or result.status is Status.INFRA:
        return None
    try:
        scorer = registry.scorer_of(result.task)
        if scorer is not None:
            scorer.check(result.task)
    except RewardError:
        return None  # the dead letters of the task and its result report the error
    if not isinstance(scorer, FeedbackJudge) or feedback.source not in scorer.sources:
        return None
    return scorer if scorer.grades or grade(feedback) is None else None


def score_of_feedback(
    feedback: Feedback, appended: int, verdict: Verdict | None = None, scorer: str = FEEDBACK_SCORER
) -> Score | None:
    """Returns the RL half of a feedback, None if the feedback makes none or has no result. `verdict`: from `scorer`, if
    that judged; else the verdict is the grade of the feedback.

    Feedback from the reward's source always makes a half. Feedback from a source that the terms name for the hint only
    makes none: its polarity is about the hint, and a late half for every complaint would add no information. A grade of
    a result with status infra does not count: it would be a verdict on the infrastructure.
    """
    result = feedback.result
    if result is None:
        return None
    if result.status is Status.INFRA:
        verdict = INFRASTRUCTURE_FAILED
    elif verdict is None:
        verdict = _graded(feedback, result.task)
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
        **verdict_fields(verdict),
    )


def _graded(feedback: Feedback, task: Task) -> Verdict:
    """Returns the verdict of a grade. An explicit grade of an answer whose reward comes from another source is marked
    if it would be that reward alone: the join lets it replace a reward that was made before it came."""
    reward = grade(feedback)
    if reward is None:
        return Verdict(None)
    if feedback.source is not task.terms.rl and feedback.source in GRADERS:
        try:
            scorer = registry.scorer_of(task)
        except RewardError:
            scorer = None  # the dead letters of the task and its result report the error
        if isinstance(scorer, OverruledJudge):
            return explicit_grade(reward, feedback.source)
    return Verdict(reward, {"feedback": reward})
