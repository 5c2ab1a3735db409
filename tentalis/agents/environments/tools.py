"""Tools that a policy may call: their schemas, the file that lists them, and the calls in a text.

The format of calls is that of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from referencing import Registry

from schemas.problems import problems
from tentalis.agents.environments.import_rules import ImportRules
from tentalis.text.yaml_file import BadYaml, read_mapping

PYTHON_TOOL = "python"
_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_NOT_SPACE = re.compile(r"\S")
_ModuleName = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]
_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"


class BadTools(ValueError):
    """A file of tools that cannot be used; the message names the file and the field."""


class Tool(BaseModel):
    """A tool. `parameters`: JSON schema of its arguments. `command`: gets the arguments as JSON on stdin, and its
    output is the tool's; relative names are in the folder of the file. `network`: endpoints (`host:port`) that it may
    reach."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)
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


class McpServer(BaseModel):
    """An MCP server whose tools the policy may call: a `command` that speaks over its pipes, or the `url` of streamable
    HTTP.

    A command runs behind the wall, one per episode, in the policy's folder. `readable`: further folders that it may
    read. `cpu_s`, `memory_mb`: of the whole server. The worker itself reaches a URL, outside of every wall.
    `token_variable`: the environment variable with the bearer token for it. `tools`: the names of those that are
    offered; None: all. `timeout_s`: of one call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    tools: tuple[str, ...] | None = Field(default=None, min_length=1)
    timeout_s: float = Field(default=120.0, gt=0.0, le=600.0)
    cpu_s: int = Field(default=600, ge=1)
    memory_mb: int = Field(default=4096, ge=16)
    readable: tuple[Path, ...] = ()
    network: tuple[str, ...] = ()
    token_variable: str | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("must have either a command or a url")
        foreign = {"command": ("token_variable",), "url": ("cpu_s", "memory_mb", "readable", "network")}
        kind = "command" if self.url is None else "url"
        given = [name for name in foreign[kind] if name in self.model_fields_set]
        if given:
            raise ValueError(f"a server with a {kind} has no {', '.join(given)}")
        return self


class PythonTool(BaseModel):
    """The tool that runs Python code: its limits, and the rules of its imports (see ImportRules)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: float = Field(default=120.0, gt=0.0, le=600.0)
    memory_mb: int = Field(default=4096, ge=16)
    allow_imports: tuple[_ModuleName, ...] | None = None
    deny_imports: tuple[_ModuleName, ...] = ()

    @property
    def rules(self) -> ImportRules:
        """The rules of imports."""
        return ImportRules(self.allow_imports, self.deny_imports)

    @property
    def signature(self) -> dict[str, Any]:
        """The tool as prompts list it."""
        description = " ".join(part for part in ("Runs Python code.", self.rules.description) if part)
        return signature(PYTHON_TOOL, description, PYTHON_SIGNATURE_PARAMETERS)


class ToolFile(BaseModel):
    """The content of a file of tools. `python`: the policy may also run Python code; true, false, or its limits and
    rules. `mcp`: servers of more tools."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: PythonTool | None = PythonTool()
    tools: tuple[Tool, ...] = ()
    mcp: tuple[McpServer, ...] = ()

    @field_validator("python", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        if isinstance(value, bool):
            return PythonTool() if value else None
        return value


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


def read_tools(path: Path, given: Mapping[str, Any] | None = None) -> ToolFile:
    """Reads a JSON or YAML file of tools. `given`: its content, if it is only a part of the file. Raises BadTools."""
    try:
        content = read_mapping(path, "the tools") if given is None else dict(given)  # JSON is YAML
    except BadYaml as error:
        raise BadTools(f"the file of tools cannot be read: {error}") from error
    whole = f"the file of tools {path}" if given is None else f"{path}: the set of tools of the environment"
    try:
        found = ToolFile.model_validate(content)
    except ValidationError as error:
        raise BadTools(f"{whole} is not valid: {problems(error, 'file')}") from error
    names = [tool.name for tool in found.tools] + ([PYTHON_TOOL] if found.python else [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadTools(f"{whole} has several tools named {', '.join(twice)}")
    servers = [server.name for server in found.mcp]
    twice = sorted({name for name in servers if servers.count(name) > 1})
    if twice:
        raise BadTools(f"{whole} has several MCP servers named {', '.join(twice)}")
    folders = {folder for server in found.mcp for folder in server.readable}
    absent = sorted(str(folder) for folder in folders if not _at(path, folder).exists())
    if absent:
        raise BadTools(f"{whole} names folders that do not exist: {', '.join(absent)}")
    for tool in found.tools:
        try:
            jsonschema.Draft202012Validator.check_schema(tool.parameters)
        except jsonschema.SchemaError as error:
            raise BadTools(f"{path}: the parameters of {tool.name} are not a JSON schema: {error.message}") from error
        remote = outside_reference(tool.parameters)
        if remote is not None:
            raise BadTools(f"{path}: the parameters of {tool.name} refer to {remote!r}: put that schema into `$defs`")
    return found


def _at(path: Path, name: Path) -> Path:
    """Returns a file or folder that the file of tools at `path` names; relative names are in its folder."""
    return path.resolve().parent / name


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call in a text: its name and arguments, or `problem`, the reason why it cannot be carried out."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


def requested_calls(text: str) -> list[RequestedCall]:
    """Returns the tool calls of a text, in order; a call that cannot be read has a problem."""
    found: list[RequestedCall] = []
    end = 0
    while (begin := text.find(_OPENED, end)) >= 0:
        begin += len(_OPENED)
        closed = _end_of_json(text, begin)
        if closed is None:
            closed = text.find(_CLOSED, begin)
        if closed < 0:
            found.append(RequestedCall("", {}, "a <tool_call> has no </tool_call>"))
            break
        found.append(_parsed(text[begin:closed].strip()))
        end = closed + len(_CLOSED)
    return found


def _end_of_json(text: str, begin: int) -> int | None:
    """Returns the position of the closing tag behind the JSON value that begins here, whose strings may hold tags; None
    if there is no value, or something else behind it."""
    try:
        _, end = _DECODER.raw_decode(text, _skip_space(text, begin))
    except (ValueError, RecursionError):
        return None
    end = _skip_space(text, end)
    return end if text.startswith(_CLOSED, end) else None


def _skip_space(text: str, begin: int) -> int:
    found = _NOT_SPACE.search(text, begin)
    return len(text) if found is None else found.start()


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


def outside_reference(schema: object) -> str | None:
    """Returns a reference of a JSON schema to something outside of it, or None. It also looks in places that are not
    schemas."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for key in ("$ref", "$dynamicRef"):
                if isinstance(each.get(key), str) and not each[key].startswith("#"):
                    return str(each[key])
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return None


def argument_problem(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Returns the first reason why arguments do not fit their JSON schema, or None."""
    validator = jsonschema.Draft202012Validator(parameters, registry=Registry())  # it fetches no schema from a URL
    error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
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
