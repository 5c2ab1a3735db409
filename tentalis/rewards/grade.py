"""The grade in a feedback: a score, or a thumb up or down."""

from schemas.records import Feedback, Polarity


def grade(feedback: Feedback) -> float | None:
    """Returns the reward in a feedback, in [-1, 1]: 2 * score - 1, else the sign of its polarity, else None."""
    if feedback.score is not None:
        return 2.0 * feedback.score - 1.0
    return {Polarity.POSITIVE: 1.0, Polarity.NEGATIVE: -1.0}.get(feedback.polarity)
