"""The events, the signals, and `detect`, which finds signals in events."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from schemas.ids import derived_id
from schemas.records import Feedback, Polarity, Result, Source
from tentalis.signals import edits, phrases, questions, tools
from tentalis.signals.language import is_english
from tentalis.signals.spoken import is_observation, spoken

EVIDENCE_CHARS = 300
_LANGUAGE_CHARS = 2000
_AUTHOR = "signal:"
TOOL_ROLES = frozenset({"tool", "function"})


class SignalName(StrEnum):
    """All signals. Each of them counts against the answer."""

    REASKED = "reasked"
    CORRECTION = "correction"
    EDIT = "edit"
    TOOL_FAILURE = "tool_failure"
    ABANDONED = "abandoned"


NAMES = frozenset(SignalName)


def names_in(text: str) -> frozenset[str]:
    """Returns the signals that a text names: `all`, `none`, or names separated by commas. Raises ValueError."""
    names = {"all": frozenset[str](NAMES), "none": frozenset[str]()}.get(text, frozenset(text.split(",")))
    if not names <= NAMES:
        raise ValueError(f"unknown {', '.join(sorted(names - NAMES))}; the signals are {', '.join(sorted(NAMES))}")
    return names


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """An answer and its question, the user's last message before it.

    `finish_reason` is the backend's ("length": the answer was cut off). `calls`: names of the tools that it called.
    """

    question: str
    answer: str
    finish_reason: str = "stop"
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UserMessage:
    """The user's next message."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of a tool that the answer called."""

    text: str
    tool: str = ""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The session ended after the answer. `closed`: it was closed explicitly; otherwise it became idle."""

    closed: bool


NextEvent = UserMessage | ToolOutput | SessionEnd


@dataclass(frozen=True, slots=True)
class Signal:
    """A sign that the answer was bad, and the text that shows it (at most EVIDENCE_CHARS)."""

    name: SignalName
    evidence: str


def detect(previous: AnsweredTurn, event: NextEvent, enabled: Collection[str] = NAMES) -> list[Signal]:
    """The signals that an event gives about the turn before it, in the order of `SignalName`. Pure: the same turn and
    event give the same signals. `enabled` names the detectors to run.

    >>> detect(AnsweredTurn("What is 7 times 8?", "It is 54."), UserMessage("That's wrong, it is 56."))
    [Signal(name=<SignalName.CORRECTION: 'correction'>, evidence="That's wrong, it is 56.")]
    """
    found = []
    for name, detector in _DETECTORS.items():
        evidence = detector(previous, event) if name in enabled else None
        if evidence is not None:
            found.append(Signal(name, _shortened(evidence)))
    return found


def event_of(role: str, text: str) -> NextEvent | None:
    """The event that a message of this role is; None for the roles of the assistant and of the system. Tool output in
    the user's role, as text agents send it, is tool output."""
    if role in TOOL_ROLES:
        return ToolOutput(text)
    if role != "user":
        return None
    return ToolOutput(text) if is_observation(text) else UserMessage(text)


def shows_success(event: NextEvent) -> bool:
    """True if an event is evidence that the answer before it did its job: thanks, or a tool that reports success."""
    if isinstance(event, ToolOutput):
        return tools.find_success(event.text) is not None
    return isinstance(event, UserMessage) and phrases.accepts(event.text)


def shows_failure(event: NextEvent) -> bool:
    """True if an event is the output of a tool that reports a failure."""
    return isinstance(event, ToolOutput) and tools.find_failure(event.text) is not None


def feedback_of(signal: Signal, result: Result, event_id: str, event_time: int) -> Feedback:
    """A signal as Feedback on the result it is about. `event_id` identifies the event that showed it, so that the same
    event read again makes the same feedback. `event_time` in ms."""
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
    """True if a detector made the feedback: its text is evidence, not a request."""
    return feedback.author.startswith(_AUTHOR)


def _reasked(turn: AnsweredTurn, event: NextEvent) -> str | None:
    if not isinstance(event, UserMessage) or not is_english(event.text[:_LANGUAGE_CHARS]):
        return None
    return event.text if questions.repeats_question(turn.question, event.text) else None


def _correction(turn: AnsweredTurn, event: NextEvent) -> str | None:
    if not isinstance(event, UserMessage):
        return None
    said = spoken(event.text)
    if said and is_english(said) and questions.insists(turn.question, said):
        return said
    return phrases.correction(event.text)


def _edit(turn: AnsweredTurn, event: NextEvent) -> str | None:
    return edits.find_edit(turn.answer, event.text) if isinstance(event, UserMessage) else None


def _tool_failure(turn: AnsweredTurn, event: NextEvent) -> str | None:
    return tools.find_failure(event.text) if isinstance(event, ToolOutput) else None


def _abandoned(turn: AnsweredTurn, event: NextEvent) -> str | None:
    if not isinstance(event, SessionEnd) or event.closed:
        return None
    if not turn.answer.strip() and not turn.calls:
        return "the session fell silent after an empty answer"
    if turn.finish_reason == "length":
        return f"the session fell silent after an answer that was cut off: {turn.answer[-100:]}"
    if phrases.correction(turn.question):
        return f"the session fell silent after the answer to a complaint: {turn.question}"
    question = questions.question_back(turn.answer)
    return f"the session fell silent after a question that nobody answered: {question}" if question else None


_DETECTORS: dict[SignalName, Callable[[AnsweredTurn, NextEvent], str | None]] = {
    SignalName.REASKED: _reasked,
    SignalName.CORRECTION: _correction,
    SignalName.EDIT: _edit,
    SignalName.TOOL_FAILURE: _tool_failure,
    SignalName.ABANDONED: _abandoned,
}


def _shortened(text: str) -> str:
    # A lone surrogate, which JSON can hold inside a string, cannot be written to the log.
    text = " ".join(text[: 10 * EVIDENCE_CHARS].split()).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= EVIDENCE_CHARS else text[: EVIDENCE_CHARS - 1] + "…"
