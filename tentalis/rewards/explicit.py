"""Explicit feedback: a grade by a person or an operator counts more than what the next message shows."""

from collections.abc import Mapping

from schemas.records import Feedback, Source
from tentalis.rewards.grade import grade
from tentalis.rewards.verdict import Verdict

GRADERS = frozenset({Source.USER, Source.OPERATOR})
"""The sources of explicit grades, which are thumbs and scores."""


def explicit_verdict(feedback: Feedback, grades: Mapping[Source, float]) -> Verdict | None:
    """Returns the verdict of the explicit grades; None without one. An operator's grade counts more than the user's,
    and a grade in the feedback itself more than both. `grades`: of the other sources, each in [-1, 1]."""
    own = grade(feedback)
    if own is not None:
        return Verdict(own, {"feedback": own})
    for source in (Source.OPERATOR, Source.USER):
        if source in grades:
            return Verdict(grades[source], {"explicit": grades[source], f"explicit.{source.value}": 1.0})
    return None
