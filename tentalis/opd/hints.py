"""Extracts a hint from feedback by rules: the instruction that would have helped the student."""

import re
import unicodedata

RULE_HINTER = "rule/7"
"""Name/version of the rule: part of every hint's id, so a changed rule needs a new version."""

MIN_CHARS = 10
MAX_CHARS = 400
MAX_SENTENCES = 3
READ_CHARS = 20_000
"""Characters read of a text: a request stands at its beginning."""

_REQUEST = re.compile(r"\bplease\b\s+(\S.*)", re.IGNORECASE)
# Chinese and Japanese write no space after a full stop.
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？｡])\s*(?![。！？｡」』）”])")
_FULL_STOP_GAP = re.compile(r"(?<=[。！？｡])\s+")
_PAUSES = "，、；。！？ "


def rule_hint(text: str) -> str | None:
    """Returns the hint in a complaint, or None if it is too short.

    Only the first three sentences are read. The hint is what follows "please" in them, or all three if none has the
    word. Text before "please" is left out: it criticises an answer that the reader of the hint has not given.

    A hint has more than 10 characters, as in OpenClaw-RL. A Chinese or Japanese character or a Hangul syllable counts
    as two: 请用中文回答 asks for as much as "In Chinese". The upper limits keep a pasted log out of the prompt; a hint
    that is too long is cut at a space or a pause.

    >>> rule_hint("That was too long and cut off: please be brief! ")
    'Please be brief!'
    >>> rule_hint("I like short answers.\\n")
    'I like short answers.'
    >>> rule_hint("no!") is None
    True
    >>> rule_hint("太长了。请用一句话回答。")
    '太长了。请用一句话回答。'
    """
    printable = "".join(char if char.isprintable() else " " for char in text[:READ_CHARS])
    sentences = _SENTENCE_END.split(" ".join(printable.split()))[:MAX_SENTENCES]
    requests = [f"Please {found[1]}" for sentence in sentences if (found := _REQUEST.search(sentence))]
    hint = _FULL_STOP_GAP.sub("", " ".join(requests or sentences))
    if _width(hint) > MAX_CHARS:
        hint = _cut(hint)
    return hint if _width(hint) > MIN_CHARS else None


def _width(text: str) -> int:
    """The characters of a text; a wide one counts as two."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _cut(text: str) -> str:
    """The text up to the last space or pause within MAX_CHARS; all of that, if its second half has none."""
    width = 0
    for at, char in enumerate(text):
        width += _width(char)
        if width > MAX_CHARS:
            text = text[:at]
            break
    end = max(text.rfind(pause) for pause in _PAUSES)
    return text[: end + 1].rstrip() if end >= len(text) // 2 else text
