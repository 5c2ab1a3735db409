"""The next-state judge by rules, for machines without a judge model: patterns over English, no understanding."""

from collections.abc import Collection

from schemas.records import Feedback, Result, Source, Task
from tentalis.rewards.next_state_terms import answers_to
from tentalis.rewards.verdict import Verdict
from tentalis.signals import NAMES, Event, Returned, Said, Turn, detect
from tentalis.signals.phrases import thanks
from tentalis.words import content_stems

TOOL_ROLES = frozenset({"tool", "function"})


class NextStateRules:
    """The detectors of `tentalis.signals` decide: any signal is -1; a tool's result without one is 1, thanks and going
    on to something else are 1, the rest is 0. Nothing next is unknown.

    `next_state_rules` in the name of its scores says what made them, and which detectors did not take part.

    Args:
        signals: names of the detectors that count.
    """

    time_limit_s = 10.0
    sources = frozenset({Source.NEXT_STATE})
    grades = False

    def __init__(self, signals: Collection[str] = NAMES) -> None:
        self._signals = frozenset(signals)
        without = sorted(NAMES - self._signals)
        self.name = "-".join(("next_state_rules/1", *(["without", *without] if without else [])))

    def check(self, task: Task) -> None:
        """Raises BadVerifierData."""
        answers_to(task, self.sources, self.name)

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """-1, 0 or 1 with the signals found, unknown if nothing came next."""
        if not feedback.text.strip():
            return Verdict.unknown(no_next_state=1.0)
        event: Event = Returned(feedback.text) if feedback.author in TOOL_ROLES else Said(feedback.text)
        calls = tuple(call.name for call in result.tool_calls)
        asked = [message.content for message in task.messages if message.role == "user"]
        turn = Turn(asked[-1] if asked else "", result.text, result.finish_reason, calls)
        found = detect(turn, event, self._signals)
        reward = -1.0 if found else 1.0 if _content(event) else 0.0
        return Verdict(reward, {"next_state": reward, **{f"signal.{signal.name.value}": 1.0 for signal in found}})


def _content(event: Event) -> bool:
    """Whether what came next, with nothing against the answer in it, speaks for it."""
    if isinstance(event, Returned):
        return True
    # Two words of content are the least of a new request; "hm", "ok?" and "lol" say nothing.
    return isinstance(event, Said) and (thanks(event.text) or len(content_stems(event.text)) >= 2)
