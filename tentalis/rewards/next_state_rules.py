"""The rule-based next-state judge, for machines without a judge model: patterns over English text."""

from collections.abc import Collection

from schemas.records import Feedback, Result, Source, Task
from tentalis.rewards.next_state_terms import check_terms
from tentalis.rewards.verdict import Verdict
from tentalis.signals import NAMES, AnsweredTurn, NextEvent, ToolOutput, UserMessage, detect
from tentalis.signals.phrases import thanks
from tentalis.text.words import content_stems

TOOL_ROLES = frozenset({"tool", "function"})


class NextStateRules:
    """Judges the next message with the detectors of `tentalis.signals`.

    Any signal is -1. Without a signal, a tool's result is 1, thanks or a new request is 1, and the rest is 0. Without
    a next message the reward is unknown.

    The scorer's name contains `next_state_rules` and the detectors that are switched off.

    Args:
        signals: names of the detectors that count.
    """

    time_limit_s = 10.0
    sources = frozenset({Source.NEXT_STATE})
    grades = False

    def __init__(self, signals: Collection[str] = NAMES) -> None:
        self._signals = frozenset(signals)
        disabled = sorted(NAMES - self._signals)
        self.name = "-".join(("next_state_rules/1", *(["without", *disabled] if disabled else [])))

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's terms do not fit this judge."""
        check_terms(task, self.sources, self.name)

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """Returns -1, 0 or 1 with the signals found; unknown if no message came next."""
        if not feedback.text.strip():
            return Verdict.unknown(no_next_state=1.0)
        event: NextEvent = ToolOutput(feedback.text) if feedback.author in TOOL_ROLES else UserMessage(feedback.text)
        calls = tuple(call.name for call in result.tool_calls)
        user_messages = [message.content for message in task.messages if message.role == "user"]
        turn = AnsweredTurn(user_messages[-1] if user_messages else "", result.text, result.finish_reason, calls)
        found = detect(turn, event, self._signals)
        reward = -1.0 if found else 1.0 if _shows_success(event) else 0.0
        return Verdict(reward, {"next_state": reward, **{f"signal.{signal.name.value}": 1.0 for signal in found}})


def _shows_success(event: NextEvent) -> bool:
    """Returns True if an event without a signal shows that the answer did its job."""
    if isinstance(event, ToolOutput):
        return True
    # A new request has at least two content words; "hm", "ok?" and "lol" show nothing.
    return isinstance(event, UserMessage) and (thanks(event.text) or len(content_stems(event.text)) >= 2)
