"""Makes a prompt of the columns of a row. Pure.

The question is `prompt` (text, or messages), else `messages`; `system` is put before it. Every other column reaches the
reward as it is, verl's `data_source`, `reward_model` and `extra_info` among them.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from tentalis.agents.scenarios.prompt_file import Prompt

PROMPT, MESSAGES, SYSTEM = "prompt", "messages", "system"
ROLES = ("system", "user", "assistant", "tool")
MOST_BYTES = 2**20
"""Bytes of the largest prompt with its columns: each of its results repeats them in one record."""


class UnusableRow(ValueError):
    """A row of which no prompt can be made; the message is the reason."""


def prompt_of(values: Mapping[str, Any], number: int, names: Mapping[str, str] | None = None) -> tuple[Prompt, bytes]:
    """Returns the prompt of a row, and its line for the file of prompts.

    `names`: new names of columns by their old ones. Raises UnusableRow.
    """
    columns = renamed(values, names or {})
    if columns.get(PROMPT) is not None:
        said = columns.pop(PROMPT)
    elif columns.get(MESSAGES) is not None:
        said = columns.pop(MESSAGES)
    else:
        have = ", ".join(sorted(map(str, values)))
        raise UnusableRow(f"neither a prompt nor messages; the columns are {have}. --column NAME=prompt names another")
    system = columns.pop(SYSTEM, None)
    prompt = Prompt(_with_system(system, _messages(said)), columns, number)
    try:
        line = prompt.as_line()
    except (ValueError, TypeError, RecursionError) as error:
        raise UnusableRow(f"it cannot be written as JSON: {error}") from error
    if len(line) > MOST_BYTES:
        raise UnusableRow(f"{len(line)} bytes with its columns; at most {MOST_BYTES} are possible")
    try:
        from_json(line)  # in the way of scoring, which refuses what is nested too deeply
    except ValueError as error:
        raise UnusableRow(f"scoring could not read it: {error}") from error
    return prompt, line


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the columns with their new names. Raises UnusableRow if one is missing or takes the name of another."""
    columns = dict(values)
    for old, new in names.items():
        if old not in values:
            raise UnusableRow(f"no column {old}, which --column {old}={new} names")
        if new in values and new not in names:
            raise UnusableRow(f"--column {old}={new}: the row already has a column {new}")
        columns.pop(old)
    return columns | {new: values[old] for old, new in names.items()}


def _messages(said: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(said, str):
        if not said.strip():
            raise UnusableRow("the prompt is empty")
        return (("user", said),)
    if not isinstance(said, list) or not said:
        raise UnusableRow(f"the prompt must be a text or a list of messages, not {_short(said)}")
    messages = tuple(_message(each) for each in said)
    if messages[-1][0] == "assistant":
        raise UnusableRow("the last message is one of the assistant: the policy is to write that one, so leave it out")
    if not messages[-1][1].strip():
        raise UnusableRow("the last message is empty")
    return messages


def _message(said: Any) -> tuple[str, str]:
    if not isinstance(said, Mapping) or "role" not in said or "content" not in said:
        raise UnusableRow(f"a message must have role and content, not {_short(said)}")
    role, content = said["role"], said["content"]
    if role not in ROLES:
        raise UnusableRow(f"the role {_short(role)} is not one of {', '.join(ROLES)}")
    if said.get("tool_calls"):
        raise UnusableRow("a message has tool calls, which a prompt cannot hold")
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    if not isinstance(content, str):
        raise UnusableRow(f"the content of a message must be a text, not {_short(content)}")
    return str(role), content


def _text_part(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise UnusableRow(f"a message has a part that is no text: {_short(part)}")
    return str(part["text"])


def _with_system(system: Any, messages: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise UnusableRow(f"the column system must be a text, not {_short(system)}")
    if messages[0][0] == "system":
        raise UnusableRow("the column system is set, and the messages begin with another system message")
    return (("system", system), *messages)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
