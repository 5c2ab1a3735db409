"""Extracts a hint from feedback by rules: the instruction that would have helped the student."""

import re

RULE_HINTER = "rule/6"
"""Name/version of the rule: part of every hint's id, so a changed rule needs a new version."""

MIN_CHARS = 10
MAX_CHARS = 400
MAX_SENTENCES = 3
READ_CHARS = 20_000
"""Characters read of a text: a request stands at its beginning."""

_REQUEST = re.compile(r"\bplease\b\s+(\S.*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")


def rule_hint(text: str) -> str | None:
    """Returns the hint in a complaint, or None if it is too short.

    Only the first three sentences are read. The hint is what follows "please" in them, or all three if none has the
    word. Text before "please" is left out: it criticises an answer that the reader of the hint has not given.

    A hint has more than 10 characters, as in OpenClaw-RL. The upper limits keep a pasted log out of the prompt.

    >>> rule_hint("That was too long and cut off: please be brief! ")
    'Please be brief!'
    >>> rule_hint("I like short answers.\\n")
    'I like short answers.'
    >>> rule_hint("no!") is None
    True
    """
    printable = "".join(char if char.isprintable() else " " for char in text[:READ_CHARS])
    sentences = _SENTENCE_END.split(" ".join(printable.split()))[:MAX_SENTENCES]
    requests = [f"Please {found[1]}" for sentence in sentences if (found := _REQUEST.search(sentence))]
    hint = " ".join(requests or sentences)
    if len(hint) > MAX_CHARS:
        hint = hint[:MAX_CHARS].rsplit(" ", 1)[0]
    return hint if len(hint) > MIN_CHARS else None
