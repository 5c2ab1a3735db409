"""What is looked at, what may be found in it, and the one function that does."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from schemas.ids import derived_id
from schemas.records import Feedback, Polarity, Result, Source
from tentalis.signals import edits, phrases, questions, tools

EVIDENCE_CHARS = 300
_AUTHOR = "signal:"


class SignalName(StrEnum):
    """Every signal there is. All of them speak against the answer."""

    REASKED = "reasked"
    CORRECTION = "correction"
    EDIT = "edit"
    TOOL_FAILURE = "tool_failure"
    ABANDONED = "abandoned"


NAMES = frozenset(SignalName)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer and what it answers: the user's last message before it.

    `finish_reason` is the backend's ("length": it was cut off). `calls`: names of the tools that the answer called.
    """

    question: str
    answer: str
    finish_reason: str = "stop"
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """The user's next message."""

    text: str


@dataclass(frozen=True, slots=True)
class Returned:
    """What a tool that the answer called gave back."""

    text: str
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The session ended after the answer. `closed`: somebody closed it; else it just fell silent."""

    closed: bool


Event = Said | Returned | Ended


@dataclass(frozen=True, slots=True)
class Signal:
    """Something against the answer, and the words that show it (at most EVIDENCE_CHARS)."""

    name: SignalName
    evidence: str


def detect(previous: Turn, event: Event, enabled: Collection[str] = NAMES) -> list[Signal]:
    """The signals that an event gives about the turn before it, in the order of `SignalName`. Pure: the same turn and
    event give the same signals. `enabled` names the detectors that may speak.

    >>> detect(Turn("What is 7 times 8?", "It is 54."), Said("That's wrong, it is 56."))
    [Signal(name=<SignalName.CORRECTION: 'correction'>, evidence="That's wrong, it is 56.")]
    """
    found = []
    for name, detector in _DETECTORS.items():
        evidence = detector(previous, event) if name in enabled else None
        if evidence is not None:
            found.append(Signal(name, _shortened(evidence)))
    return found


def feedback_of(signal: Signal, result: Result, event_id: str, event_time: int) -> Feedback:
    """A signal as Feedback on the result it speaks of. `event_id`: of the event that showed it, so that the same event
    read again makes the same feedback. `event_time` in ms."""
    return Feedback(
        feedback_id=derived_id("signal", result.result_id, signal.name.value, event_id),
        event_time=event_time,
        task_id=result.task.task_id,
        sample_index=result.sample_index,
        source=Source.ENVIRONMENT,
        author=_AUTHOR + signal.name.value,
        polarity=Polarity.NEGATIVE,
        text=signal.evidence,
        result=result,
    )


def from_signal(feedback: Feedback) -> bool:
    """Whether feedback is a detector's: its text is evidence and asks for nothing."""
    return feedback.author.startswith(_AUTHOR)


def _reasked(turn: Turn, event: Event) -> str | None:
    return event.text if isinstance(event, Said) and questions.asked_again(turn.question, event.text) else None


def _correction(turn: Turn, event: Event) -> str | None:
    if not isinstance(event, Said):
        return None
    return event.text if questions.insists(turn.question, event.text) else phrases.correction(event.text)


def _edit(turn: Turn, event: Event) -> str | None:
    return edits.edit(turn.answer, event.text) if isinstance(event, Said) else None


def _tool_failure(turn: Turn, event: Event) -> str | None:
    return tools.failure(event.text) if isinstance(event, Returned) else None


def _abandoned(turn: Turn, event: Event) -> str | None:
    if not isinstance(event, Ended) or event.closed:
        return None
    if not turn.answer.strip() and not turn.calls:
        return "the session fell silent after an empty answer"
    if turn.finish_reason == "length":
        return f"the session fell silent after an answer that was cut off: {turn.answer[-100:]}"
    if phrases.correction(turn.question):
        return f"the session fell silent after the answer to a complaint: {turn.question}"
    asked = questions.asks_back(turn.answer)
    return f"the session fell silent after a question that nobody answered: {asked}" if asked else None


_DETECTORS: dict[SignalName, Callable[[Turn, Event], str | None]] = {
    SignalName.REASKED: _reasked,
    SignalName.CORRECTION: _correction,
    SignalName.EDIT: _edit,
    SignalName.TOOL_FAILURE: _tool_failure,
    SignalName.ABANDONED: _abandoned,
}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= EVIDENCE_CHARS else text[: EVIDENCE_CHARS - 1] + "…"
