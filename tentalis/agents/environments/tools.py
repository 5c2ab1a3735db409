"""Tools that a policy may call: their schemas, and the file that lists them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from referencing import Registry

from schemas.problems import problems
from tentalis.agents.environments.import_rules import ImportRules
from tentalis.text.yaml_file import BadYaml, read_mapping

PYTHON_TOOL = "python"
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
        if (problem := schema_problem(tool.parameters)) is not None:
            raise BadTools(f"{path}: the parameters of {tool.name} {problem}")
    return found


def _at(path: Path, name: Path) -> Path:
    """Returns a file or folder that the file of tools at `path` names; relative names are in its folder."""
    return path.resolve().parent / name


def schema_problem(parameters: Mapping[str, Any]) -> str | None:
    """Returns why the schema of a tool's arguments cannot be used, to follow "the parameters of ...", or None."""
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        return f"are not a JSON schema: {error.message}"
    remote = _outside_reference(parameters)
    return None if remote is None else f"refer to {remote[:200]!r}, outside of their schema: put it into `$defs`"


def _outside_reference(schema: object) -> str | None:
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
