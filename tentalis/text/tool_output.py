"""Makes the output of a program fit for a prompt: readable, bounded, and without control of terminal or chat."""

import re

# Escape sequences of terminals: CSI, OSC up to its end, and the two-character ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# The beginning of a special token in most chat templates, such as <|im_end|>.
_SPECIAL = re.compile(r"<(?=\|)")


def readable_text(output: bytes) -> str:
    """Returns output as text without escape sequences and control characters; `<|` becomes `< |`, so that the text
    cannot end a turn of the chat and begin another."""
    text = output.decode("utf-8", errors="replace").replace("\r\n", "\n")
    return _SPECIAL.sub("< ", _CONTROL.sub("", _ESCAPES.sub("", text)))


def head_and_tail(text: str, limit: int) -> str:
    """Returns a text of at most about `limit` characters: its beginning and its end, with the number left out between.

    >>> head_and_tail("abcdefghij", 4)
    'ab\\n[... 6 characters left out ...]\\nij'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
