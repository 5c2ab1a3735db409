"""The prompt that the teacher sees: the student's, with the hint at the end of the last user message."""

from collections.abc import Sequence

from schemas.records import Message

HINT_TAG = "[user's hint / instruction]"


class NoUserMessage(ValueError):
    """A prompt in which nobody asks: a hint has no place in it."""


def hinted(messages: Sequence[Message], hint: str) -> list[dict[str, str]]:
    """The messages with the hint after a blank line, under its tag, in the last user message. The input is not changed.

    Raises NoUserMessage.

    >>> hinted([Message(role="user", content="Why?")], "Be brief, please.")[0]["content"]
    "Why?\\n\\n[user's hint / instruction]\\nBe brief, please."
    """
    asked = [index for index, message in enumerate(messages) if message.role == "user"]
    if not asked:
        raise NoUserMessage(f"none of {len(messages)} messages is a user's: there is nowhere to put the hint")
    prompt = [{"role": message.role, "content": message.content} for message in messages]
    prompt[asked[-1]]["content"] += f"\n\n{HINT_TAG}\n{hint}"
    return prompt
