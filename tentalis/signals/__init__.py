"""Implicit signals: signs that an answer was bad, without an explicit grade. Pure functions, in six languages.

In: a turn and the event after it (a message, a tool result, the session's end). Out: signals, as Feedback.
Begin with `detect` in core.py.
"""

from tentalis.signals.core import (
    NAMES,
    TOOL_ROLES,
    AnsweredTurn,
    NextEvent,
    SessionEnd,
    Signal,
    SignalName,
    ToolOutput,
    UserMessage,
    detect,
    event_of,
    feedback_of,
    from_signal,
    names_in,
    shows_failure,
    shows_success,
)

__all__ = [
    "NAMES",
    "TOOL_ROLES",
    "AnsweredTurn",
    "NextEvent",
    "SessionEnd",
    "Signal",
    "SignalName",
    "ToolOutput",
    "UserMessage",
    "detect",
    "event_of",
    "feedback_of",
    "from_signal",
    "names_in",
    "shows_failure",
    "shows_success",
]
