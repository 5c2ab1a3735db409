"""The rule-based next-state judge, for machines without a judge model: patterns over text in six languages."""

from collections.abc import Collection, Mapping

from schemas.records import Feedback, Result, Source, Task
from tentalis.rewards.explicit import GRADERS, explicit_verdict
from tentalis.rewards.next_state_terms import check_terms
from tentalis.rewards.verdict import Verdict
from tentalis.signals import NAMES, AnsweredTurn, detect, event_of, shows_success


class NextStateRules:
    """Judges the next message with the detectors of `tentalis.signals`.

    An explicit grade before the next message is the reward. Else any signal is -1. Else evidence of success is 1:
    thanks or praise without a doubt, or a tool that reports its success. Everything else is unknown, and is not
    trained: a new request, a language that the rules do not read, and tool output that does not say how it went.

    The scorer's name contains `next_state_rules` and the detectors that are switched off.

    Args:
        signals: names of the detectors that count.
    """

    time_limit_s = 10.0
    sources = frozenset({Source.NEXT_STATE})
    grades = True
    graders = GRADERS
    grade_is_reward = True

    def __init__(self, signals: Collection[str] = NAMES) -> None:
        self._signals = frozenset(signals)
        disabled = sorted(NAMES - self._signals)
        self.name = "-".join(("next_state_rules/4", *(["without", *disabled] if disabled else [])))

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's terms do not fit this judge."""
        check_terms(task, self.sources, self.name)

    async def judge_grades(
        self, task: Task, result: Result, feedback: Feedback, grades: Mapping[Source, float]
    ) -> Verdict:
        """Returns the explicit grade if there is one, else the verdict of the next message."""
        return explicit_verdict(feedback, grades) or await self.judge_feedback(task, result, feedback)

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """Returns -1 or 1 with the evidence; unknown without evidence."""
        if not feedback.text.strip():
            return Verdict.unknown(no_next_state=1.0)
        event = event_of(feedback.author or "user", feedback.text)
        if event is None:
            return Verdict.unknown(no_evidence=1.0)
        calls = tuple(call.name for call in result.tool_calls)
        user_messages = [message.content for message in task.messages if message.role == "user"]
        turn = AnsweredTurn(user_messages[-1] if user_messages else "", result.text, result.finish_reason, calls)
        found = detect(turn, event, self._signals)
        if found:
            return Verdict(-1.0, {"next_state": -1.0, **{f"signal.{signal.name.value}": 1.0 for signal in found}})
        if shows_success(event):
            return Verdict(1.0, {"next_state": 1.0})
        return Verdict.unknown(no_evidence=1.0)
