"""Implicit signals: what people and tools show of an answer without grading it. Pure functions, English only."""

from tentalis.signals.core import (
    NAMES,
    Ended,
    Event,
    Returned,
    Said,
    Signal,
    SignalName,
    Turn,
    detect,
    feedback_of,
    from_signal,
)

__all__ = [
    "NAMES",
    "Ended",
    "Event",
    "Returned",
    "Said",
    "Signal",
    "SignalName",
    "Turn",
    "detect",
    "feedback_of",
    "from_signal",
]
