"""The teacher's prompt: the student's, with the hint at the end of the last user message."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from schemas.records import Task
from tentalis.inference.chat_messages import as_sent
from tentalis.text.timestamps import LAST_MS

HINT_TAG = "[user's hint / instruction]"
EVENT_KEY, REQUEST_KEY = "session_event_id", "request"
"""Metadata keys of a turn's task: its source event, and the rest of the request as the gateway recorded it. Other
tasks may use their metadata freely."""
TEMPLATE_SETTINGS, DATE_SETTING = "chat_template_kwargs", "date_string"
"""The request field with the chat template's settings, and the setting that Llama's templates read for the date."""


class NoUserMessage(ValueError):
    """The prompt has no user message that could take the hint."""


class NoPrompt(ValueError):
    """The student's prompt cannot be rebuilt from the task."""


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """Messages in OpenAI's format, and the other inputs of a chat template: tools and template settings."""

    messages: Sequence[dict[str, Any]]
    template: dict[str, Any]


def student_prompt(task: Task) -> TeacherPrompt:
    """The student's prompt. Raises NoPrompt for content that token ids do not represent (images), and for a recorded
    request that cannot be read."""
    try:
        request = task.metadata.get(REQUEST_KEY, "") if EVENT_KEY in task.metadata else ""
        messages, template = as_sent(task.messages, request)
    except (ValueError, RecursionError) as error:
        raise NoPrompt(f"the recorded request cannot be read: {error}") from error
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = "text" if isinstance(part, str) else part.get("type")
            if kind != "text":
                raise NoPrompt(f"a message has content of type {kind!r}, which its tokens do not represent")
    return TeacherPrompt(messages, template)


def with_date(prompt: TeacherPrompt, at: int) -> TeacherPrompt | None:
    """The prompt with the date of `at` (ms, UTC), for a template that reads `date_string` and otherwise writes today's
    date. None if the request sets a date itself or `at` is out of range.

    >>> with_date(TeacherPrompt([], {}), 1_772_323_200_000).template
    {'chat_template_kwargs': {'date_string': '01 Mar 2026'}}
    """
    settings = prompt.template.get(TEMPLATE_SETTINGS) or {}
    if not isinstance(settings, dict) or DATE_SETTING in settings or not 0 <= at < LAST_MS:
        return None
    day = datetime.fromtimestamp(at / 1000, UTC).strftime("%d %b %Y")
    return TeacherPrompt(prompt.messages, prompt.template | {TEMPLATE_SETTINGS: {**settings, DATE_SETTING: day}})


def with_hint(prompt: TeacherPrompt, hint: str) -> TeacherPrompt:
    """The prompt with the hint at the end of the last user message, after a blank line and its tag. Makes a copy.

    Raises NoUserMessage.

    >>> prompt = TeacherPrompt([{"role": "user", "content": "Why?"}], {})
    >>> with_hint(prompt, "Be brief, please.").messages[0]["content"]
    "Why?\\n\\n[user's hint / instruction]\\nBe brief, please."
    """
    messages = list(prompt.messages)
    user_indices = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not user_indices:
        raise NoUserMessage(f"none of {len(messages)} messages has the role user, so the hint has no place")
    last, hint_text = messages[user_indices[-1]], f"\n\n{HINT_TAG}\n{hint}"
    content = last["content"]
    content_with_hint = (
        [*content, {"type": "text", "text": hint_text}] if isinstance(content, list) else f"{content or ''}{hint_text}"
    )
    messages[user_indices[-1]] = last | {"content": content_with_hint}
    return TeacherPrompt(messages, prompt.template)
