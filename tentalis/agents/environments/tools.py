"""Tools that a policy may call: their schemas, the file that lists them, and the calls in a text.

The format of calls is that of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problems
from tentalis.text.yaml_file import BadYaml, read_mapping

PYTHON_TOOL = "python"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPENED = "<tool_call>"


class BadTools(ValueError):
    """A file of tools that cannot be used; the message names the file and the field."""


class Tool(BaseModel):
    """A tool. `parameters`: JSON schema of its arguments. `command`: gets the arguments as JSON on stdin, and its
    output is the tool's; relative names are in the folder of the file. `network`: endpoints (`host:port`) that it may
    reach."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")
    description: str
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    command: tuple[str, ...] = Field(min_length=1)
    timeout_s: float = Field(default=120.0, gt=0.0, le=600.0)
    memory_mb: int = Field(default=4096, ge=16)
    network: tuple[str, ...] = ()

    @property
    def signature(self) -> dict[str, Any]:
        """The tool as prompts list it."""
        return signature(self.name, self.description, self.parameters)


class ToolFile(BaseModel):
    """The content of a file of tools. `python`: the policy may also run Python code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: bool = True
    tools: tuple[Tool, ...] = ()


PYTHON_SIGNATURE_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code; what it prints is returned."}},
    "required": ["code"],
    "additionalProperties": False,
}


def signature(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool as prompts list it, in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def read_tools(path: Path) -> ToolFile:
    """Reads a JSON or YAML file of tools. Raises BadTools."""
    try:
        content = read_mapping(path, "the tools")  # JSON is YAML
    except BadYaml as error:
        raise BadTools(f"the file of tools cannot be read: {error}") from error
    try:
        found = ToolFile.model_validate(content)
    except ValidationError as error:
        raise BadTools(f"the file of tools {path} is not valid: {problems(error, 'file')}") from error
    names = [tool.name for tool in found.tools] + ([PYTHON_TOOL] if found.python else [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadTools(f"the file of tools {path} has several tools named {', '.join(twice)}")
    for tool in found.tools:
        try:
            jsonschema.Draft202012Validator.check_schema(tool.parameters)
        except jsonschema.SchemaError as error:
            raise BadTools(f"{path}: the parameters of {tool.name} are not a JSON schema: {error.message}") from error
    return found


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call in a text: its name and arguments, or `problem`, the reason why it cannot be carried out."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


def requested_calls(text: str) -> list[RequestedCall]:
    """Returns the tool calls of a text, in order; a call that cannot be read has a problem."""
    found = [_parsed(match.group(1)) for match in _CALL.finditer(text)]
    if _OPENED in _CALL.sub("", text):
        found.append(RequestedCall("", {}, "a <tool_call> has no </tool_call>"))
    return found


def _parsed(content: str) -> RequestedCall:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        return RequestedCall("", {}, f"the tool call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return RequestedCall("", {}, 'a tool call must be {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return RequestedCall(value["name"], {}, "the arguments of a tool call must be a JSON object")
    return RequestedCall(value["name"], arguments)


def argument_problem(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Returns the first reason why arguments do not fit their JSON schema, or None."""
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(parameters).iter_errors(arguments))
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path)
    return f"arguments{'.' + where if where else ''}: {error.message}"


def instructions(signatures: Sequence[Mapping[str, Any]]) -> str:
    """Returns the part of a system prompt that lists tools, in the words of Qwen's chat template."""
    listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in signatures)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
