"""Tools and results of an MCP server, as the policy sees them. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)
from mcp_types import Tool as ListedTool

from tentalis.agents.environments.tools import schema_problem, signature
from tentalis.text.tool_output import head_and_tail, readable_text

DESCRIPTION_CHARACTERS = 2000
"""Characters of a tool's description that the prompt has: its head and tail."""


class BadServerTool(ValueError):
    """A tool of a server that cannot be offered; the message has the reason."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of an MCP server. `parameters`: the JSON schema of its arguments. `signature`: as prompts list it."""

    name: str
    parameters: Mapping[str, Any]
    signature: Mapping[str, Any]


def server_tool(listed: ListedTool) -> ServerTool:
    """Returns a listed tool. What the prompt shows of it cannot forge a turn. Raises BadServerTool."""
    parameters = listed.input_schema
    if (problem := schema_problem(parameters)) is not None:
        raise BadServerTool(f"the parameters of {listed.name!r} {problem}")
    shown = signature(
        readable(listed.name), head_and_tail(readable(listed.description or ""), DESCRIPTION_CHARACTERS), parameters
    )
    shown["function"]["parameters"] = json.loads(readable(json.dumps(parameters)))
    return ServerTool(listed.name, parameters, shown)


def result_bytes(result: CallToolResult) -> bytes:
    """Returns the content of a result: its texts, and a note for each part that is not text. An error is marked."""
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(part for part in parts if part)
    return (f"error: {text}" if result.is_error else text).encode("utf-8", errors="replace")


def readable(text: str) -> str:
    """Returns a text of a server without control characters, and with `<|` as `< |`."""
    return readable_text(text.encode("utf-8", errors="replace"))


def _shown(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.mime_type}, {len(block.data)} characters of base64: not shown]"
        case ResourceLink():
            return f"[resource {block.uri}]"
        case EmbeddedResource():
            resource = block.resource
            if isinstance(resource, BlobResourceContents):
                return f"[resource {resource.uri}, {len(resource.blob)} characters of base64: not shown]"
            return resource.text
