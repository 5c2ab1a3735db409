"""Whether a message asks the question before it again, and whether an answer asks something back."""

import re

from tentalis.signals.phrases import thanks
from tentalis.words import content_stems, sentences, words

MOST_CHARS = 4000
"""What is looked at of a message: a pasted document is no question asked again."""

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
_MARKED = 0.3
_COVERED = 0.6
_LEAST_STEMS = 2
_SENTENCES = 3
_INSISTENCE_WORDS = 5


def asked_again(question: str, message: str) -> bool:
    """Whether a message asks what the question before it asked.

    Content words (stems) are compared, of the message and of each of its first sentences: nothing new is in it, and at
    least 0.6 of the question's is. A word exchanged for another makes another question (France, Spain). Who says "I
    asked", "again" or "you did not answer" needs 0.3 and may add words.
    """
    if len(message) > MOST_CHARS or thanks(message):
        return False
    if words(question) == words(message):
        return bool(words(question))
    asked = content_stems(question[:MOST_CHARS])
    if _AGAIN.search(message):
        return bool(asked) and len(asked & content_stems(message)) >= _MARKED * len(asked)
    if len(asked) < _LEAST_STEMS:
        return False
    texts = (message, *sentences(message)[:_SENTENCES])
    return any(_same(asked, content_stems(text)) for text in texts)


def _same(asked: set[str], asks: set[str]) -> bool:
    return asks <= asked and len(asks) >= max(_LEAST_STEMS, _COVERED * len(asked))


def insists(question: str, message: str) -> bool:
    """Whether a message only repeats, with an exclamation mark, some words of what was asked: "In Spanish!"."""
    said = words(message)
    if not 0 < len(said) <= _INSISTENCE_WORDS or not message.rstrip().endswith("!"):
        return False
    return bool(content_stems(message)) and content_stems(message) <= content_stems(question)


def asks_back(answer: str) -> str | None:
    """The question with which an answer ends because it cannot go on without the user; None for courtesies."""
    said = sentences(answer[-MOST_CHARS:])
    if not said or _COURTESY.search(said[-1]):
        return None
    last = said[-1]
    asks = last.rstrip("\"'”’)]* ").endswith("?") and _WANTS_TO_KNOW.search(last)
    # A request counts only as all that is said: "let me know how it goes" ends answers that were complete.
    return last if asks or (len(said) == 1 and _PLEASE_TELL.search(last)) else None
