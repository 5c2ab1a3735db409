"""The prompt that the teacher sees: the student's, with the hint at the end of the last user message."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from schemas.records import Task
from tentalis.gateway.messages import as_sent
from tentalis.moments import LAST_MS

HINT_TAG = "[user's hint / instruction]"
EVENT, REQUEST = "session_event_id", "request"
"""Metadata of a turn's task: the event that it was made of, and the rest of its request as the gateway wrote it down.
Of other tasks the metadata is their maker's own."""
SETTINGS, DATE = "chat_template_kwargs", "date_string"
"""Where a request has settings of its chat template, and the one that Llama's read for today's date."""


class NoUserMessage(ValueError):
    """A prompt in which nobody asks: a hint has no place in it."""


class NoPrompt(ValueError):
    """What the student was asked cannot be asked again."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages as OpenAI writes them, and what else a chat template reads: tools, its own settings."""

    messages: Sequence[dict[str, Any]]
    template: dict[str, Any]


def students(task: Task) -> Prompt:
    """What the student was asked. Raises NoPrompt for what token ids alone do not say (images), and for what is not
    known any more."""
    try:
        request = task.metadata.get(REQUEST, "") if EVENT in task.metadata else ""
        messages, template = as_sent(task.messages, request)
    except (ValueError, RecursionError) as error:
        raise NoPrompt(f"what else was in the request cannot be read: {error}") from error
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = "text" if isinstance(part, str) else part.get("type")
            if kind != "text":
                raise NoPrompt(f"a message has content of type {kind!r}, which is not in its tokens")
    return Prompt(messages, template)


def dated(prompt: Prompt, at: int) -> Prompt | None:
    """The prompt on the day of a time (ms, UTC), for a template that takes the date from `date_string` and writes
    today's without it; None where the request says a date itself, or the time is none.

    >>> dated(Prompt([], {}), 1_772_323_200_000).template
    {'chat_template_kwargs': {'date_string': '01 Mar 2026'}}
    """
    settings = prompt.template.get(SETTINGS) or {}
    if not isinstance(settings, dict) or DATE in settings or not 0 <= at < LAST_MS:
        return None
    day = datetime.fromtimestamp(at / 1000, UTC).strftime("%d %b %Y")
    return Prompt(prompt.messages, prompt.template | {SETTINGS: {**settings, DATE: day}})


def hinted(prompt: Prompt, hint: str) -> Prompt:
    """The prompt with the hint after a blank line, under its tag, in the last user message. The input is not changed.

    Raises NoUserMessage.

    >>> hinted(Prompt([{"role": "user", "content": "Why?"}], {}), "Be brief, please.").messages[0]["content"]
    "Why?\\n\\n[user's hint / instruction]\\nBe brief, please."
    """
    messages = list(prompt.messages)
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise NoUserMessage(f"none of {len(messages)} messages is a user's: there is nowhere to put the hint")
    last, added = messages[asked[-1]], f"\n\n{HINT_TAG}\n{hint}"
    content = last["content"]
    more = [*content, {"type": "text", "text": added}] if isinstance(content, list) else f"{content or ''}{added}"
    messages[asked[-1]] = last | {"content": more}
    return Prompt(messages, prompt.template)
