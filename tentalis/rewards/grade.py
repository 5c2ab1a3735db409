"""The grade in a feedback: what somebody said of an answer in numbers, or by a thumb."""

from schemas.records import Feedback, Polarity


def grade(feedback: Feedback) -> float | None:
    """The reward in a feedback, [-1, 1]: 2 * score - 1, or the sign of its polarity, None if it has neither."""
    if feedback.score is not None:
        return 2.0 * feedback.score - 1.0
    return {Polarity.POSITIVE: 1.0, Polarity.NEGATIVE: -1.0}.get(feedback.polarity)
