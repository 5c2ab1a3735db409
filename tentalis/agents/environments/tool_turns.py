"""Turns of tool calls, for the environments whose policy calls tools: the prompt, the calls that are carried out, and
what the policy sees of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.records import Message, ToolCall
from tentalis.agents.environments.protocol import Observation
from tentalis.agents.environments.tools import argument_problem
from tentalis.text.tool_calls import RequestedCall, instructions, tool_response

SHOWN_CHARACTERS = 8000
"""Characters of a tool's output that the policy sees: its head and tail."""
MOST_CALLS = 8
"""Calls of one turn that are carried out."""


def call_problem(call: RequestedCall, number: int, parameters: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the reason why call `number` (from 0) of a turn is not carried out, or None. `parameters`: the JSON
    schema of the arguments of each tool."""
    if call.problem is not None:
        return call.problem
    if number >= MOST_CALLS:
        return f"only the first {MOST_CALLS} calls of a turn are carried out"
    if call.name not in parameters:
        return f"no tool {call.name!r}; the tools are {', '.join(parameters) or 'none'}"
    return argument_problem(parameters[call.name], call.arguments)


def after_calls(made: Sequence[ToolCall]) -> Observation:
    """Returns what the policy sees of the calls of its turn."""
    return Observation((Message(role="user", content="\n".join(tool_response(call.result or "") for call in made)),))


def with_tools(messages: Sequence[Message], signatures: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Returns a prompt with the list of tools in its system message."""
    said, rest = "", messages
    if messages and messages[0].role == "system":
        said, rest = f"{messages[0].content}\n\n", messages[1:]
    return (Message(role="system", content=said + instructions(signatures)), *rest)
