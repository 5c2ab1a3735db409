"""Detects a message that repeats the question before it, and an answer that asks the user a question."""

import re

from tentalis.signals.phrases import thanks
from tentalis.text.words import content_stems, sentences, words

MAX_CHARS = 4000
"""A longer message, such as a pasted document, is never a repeated question; other texts are cut to this length."""

_AGAIN = re.compile(
    r"\b(?:i (?:asked|was asking|am asking)|i'm asking|my question (?:was|is)|(?:once|one) (?:more|again)|again\s*:)"
    r"|\b(?:did not|didn't|have not|haven't|never) answer",
    re.IGNORECASE,
)
_TELL = "(?:tell|give|send|share|provide|specify|clarify|confirm|let)"
_WANTS_TO_KNOW = re.compile(
    r"\b(?:which|what|when|where|who|whom|how (?:many|much|long|often|old|big|far)"
    rf"|(?:can|could|would|will) you (?:please )?{_TELL}|(?:can|could|may) i (?:please )?(?:have|know))\b",
    re.IGNORECASE,
)
_PLEASE_TELL = re.compile(rf"\bplease {_TELL} (?:me|us)\b|\bi (?:first )?need (?:to know|you to)\b", re.IGNORECASE)
_COURTESY = re.compile(
    r"\b(?:anything else|something else|(?:any|other|more|further) questions?|(?:does|did) (?:that|this|it) help"
    r"|make(?:s)? sense|another one|what do you think|how does (?:that|this) sound)\b",
    re.IGNORECASE,
)
_MIN_OVERLAP_MARKED = 0.3
_MIN_OVERLAP = 0.6
_MIN_STEMS = 2
_SENTENCES = 3
_INSISTENCE_WORDS = 5


def repeats_question(question: str, message: str) -> bool:
    """True if a message repeats the question before it.

    Compares content words (stems) with the message and with each of its first sentences: it may contain no new stem and
    must contain at least 0.6 of the question's. A replaced word makes a different question (France, Spain). A message
    with "I asked", "again" or "you did not answer" needs only 0.3 and may add words.
    """
    if len(message) > MAX_CHARS or thanks(message):
        return False
    if words(question) == words(message):
        return bool(words(question))
    question_stems = content_stems(question[:MAX_CHARS])
    if _AGAIN.search(message):
        return bool(question_stems) and len(question_stems & content_stems(message)) >= _MIN_OVERLAP_MARKED * len(
            question_stems
        )
    if len(question_stems) < _MIN_STEMS:
        return False
    texts = (message, *sentences(message)[:_SENTENCES])
    return any(_covers(question_stems, content_stems(text)) for text in texts)


def _covers(question_stems: set[str], message_stems: set[str]) -> bool:
    return message_stems <= question_stems and len(message_stems) >= max(_MIN_STEMS, _MIN_OVERLAP * len(question_stems))


def insists(question: str, message: str) -> bool:
    """True if a message only repeats some words of the question, with an exclamation mark: "In Spanish!"."""
    message_words = words(message)
    if not 0 < len(message_words) <= _INSISTENCE_WORDS or not message.rstrip().endswith("!"):
        return False
    return bool(content_stems(message)) and content_stems(message) <= content_stems(question)


def question_back(answer: str) -> str | None:
    """The question at the end of an answer that needs the user's reply to continue; None for courtesies."""
    parts = sentences(answer[-MAX_CHARS:])
    if not parts or _COURTESY.search(parts[-1]):
        return None
    last = parts[-1]
    is_question = last.rstrip("\"'”’)]* ").endswith("?") and _WANTS_TO_KNOW.search(last)
    # A request counts only if it is the whole answer: complete answers also end with "let me know how it goes".
    return last if is_question or (len(parts) == 1 and _PLEASE_TELL.search(last)) else None
