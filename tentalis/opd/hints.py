"""What feedback says as a hint: the instruction that would have helped, had the student known it."""

import re

RULE_HINTER = "rule/4"
"""Name/version of the rule: part of every hint's id, so a changed rule needs a new version."""

MIN_CHARS = 10
MAX_CHARS = 400
MAX_SENTENCES = 3

_REQUEST = re.compile(r"\bplease\b\s+(\S.*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")


def rule_hint(text: str) -> str | None:
    """The hint in a complaint: what it asks for, or None if it is too short to be a hint.

    Of its first three sentences those that say "please" are the request, and only from there on: the reproach before it
    speaks of an answer that whoever reads the hint has not given yet. Without a request the sentences are the hint.

    The length rule is OpenClaw-RL's (a hint has more than 10 characters); the caps keep a pasted log out of the prompt.

    >>> rule_hint("That was too long and cut off: please be brief! ")
    'Please be brief!'
    >>> rule_hint("I like short answers.\\n")
    'I like short answers.'
    >>> rule_hint("no!") is None
    True
    """
    printable = "".join(char if char.isprintable() else " " for char in text)
    sentences = _SENTENCE_END.split(" ".join(printable.split()))[:MAX_SENTENCES]
    requests = [f"Please {found[1]}" for sentence in sentences if (found := _REQUEST.search(sentence))]
    hint = " ".join(requests or sentences)
    if len(hint) > MAX_CHARS:
        hint = hint[:MAX_CHARS].rsplit(" ", 1)[0]
    return hint if len(hint) > MIN_CHARS else None
