"""The format of answers in steps: `<step>...</step>` blocks, then one `<answer>...</answer>` block. Pure."""

import re
from collections.abc import Sequence

from schemas.records import Message

_TAG = re.compile(r"<(/?)step>", re.IGNORECASE)

INSTRUCTIONS = (
    "Work step by step. Write each step in a block of its own, <step>...</step>. After the last step, write "
    "the final answer, and nothing else, in one block <answer>...</answer>."
)


def with_instructions(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns messages with the instructions for the format at the end of the system message."""
    said, rest = "", tuple(messages)
    if rest[0].role == "system":
        said, rest = f"{rest[0].content}\n\n", rest[1:]
    return (Message(role="system", content=said + INSTRUCTIONS), *rest)


def tagged_steps(text: str) -> tuple[str, ...]:
    """Returns the contents of the step blocks that are closed and not empty, in order.

    >>> tagged_steps("<step> 6 * 7 = 42 </step><step></step><STEP>Done.</STEP><step>not closed <answer>42</answer>")
    ('6 * 7 = 42', 'Done.')
    """
    found, opened = list[str](), None
    for tag in _TAG.finditer(text):  # one pass: a pattern of the whole block is quadratic in blocks that are not closed
        if not tag.group(1):
            opened = tag.end() if opened is None else opened
        elif opened is not None:
            found.append(text[opened : tag.start()].strip())
            opened = None
    return tuple(step for step in found if step)


def steps_or_whole(text: str) -> tuple[str, ...]:
    """Returns the steps of a text; without step blocks, the whole text is one step.

    >>> steps_or_whole(" It is 42. "), steps_or_whole("  ")
    (('It is 42.',), ())
    """
    whole = text.strip()
    return tagged_steps(text) or ((whole,) if whole else ())
