"""What feedback says as a hint: the instruction that would have helped, had the student known it."""

import re

RULE_HINTER = "rule/1"
"""Name/version of `rule_hint`: part of every hint's id, so a changed rule needs a new version."""

MIN_CHARS = 10
MAX_CHARS = 400
MAX_SENTENCES = 3

_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")


def rule_hint(text: str) -> str | None:
    """The hint in a complaint: its first one to three sentences, or None if it is too short to be one.

    The length rule is OpenClaw-RL's (a hint has more than 10 characters); the caps keep a pasted log out of the prompt.

    >>> rule_hint("  That was too long.\\nPlease be brief! ")
    'That was too long. Please be brief!'
    >>> rule_hint("no!") is None
    True
    """
    printable = "".join(char if char.isprintable() else " " for char in text)
    sentences = _SENTENCE_END.split(" ".join(printable.split()))[:MAX_SENTENCES]
    hint = " ".join(sentences)
    if len(hint) > MAX_CHARS:
        hint = hint[:MAX_CHARS].rsplit(" ", 1)[0]
    return hint if len(hint) > MIN_CHARS else None
