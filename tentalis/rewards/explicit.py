"""Explicit feedback: a grade by a person or an operator counts more than what the next message shows."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from schemas.records import EXPLICIT, Feedback, Source
from tentalis.rewards.grade import grade
from tentalis.rewards.verdict import GradingJudge, Verdict

GRADERS = frozenset({Source.USER, Source.OPERATOR})
"""The sources of explicit grades, which are thumbs and scores."""


@runtime_checkable
class OverruledJudge(GradingJudge, Protocol):
    """A GradingJudge whose reward is an explicit grade alone, where there is one."""

    @property
    def grade_is_reward(self) -> bool:
        """True."""
        ...


def explicit_grade(value: float, source: Source) -> Verdict:
    """Returns the verdict of an explicit grade, in [-1, 1], of a source."""
    return Verdict(value, {EXPLICIT: value, f"{EXPLICIT}.{source.value}": 1.0})


def explicit_verdict(feedback: Feedback, grades: Mapping[Source, float]) -> Verdict | None:
    """Returns the verdict of the explicit grades; None without one. An operator's grade counts more than the user's,
    and a grade in the feedback itself more than both. `grades`: of the other sources, each in [-1, 1]."""
    own = grade(feedback)
    if own is not None:
        return Verdict(own, {"feedback": own})
    for source in (Source.OPERATOR, Source.USER):
        if source in grades:
            return explicit_grade(grades[source], source)
    return None
