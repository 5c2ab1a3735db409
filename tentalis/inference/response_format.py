"""The grammar of an answer that must have a form: `response_format`, `tool_choice`. Pure.

Every answer that a grammar allows is valid; not every valid answer is allowed. JSON is written on one line, properties
come in the schema's order, and characters are not escaped as `\\u`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tentalis.text.tool_calls import CLOSED, OPENED

# `no_forcing`: otherwise text that the grammar forces would have one tokenisation only, and the sampled distribution
# would not be the model's over the allowed texts.
_HEAD = '%llguidance {"no_forcing": true}\n'
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NAME = re.compile(r"[\w.-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class InvalidFormat(Exception):
    """A field of the request that sets the form of the answer is wrong. `param`: its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def answer_grammar(
    response_format: Any, tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: Any = None
) -> str | None:
    """Returns the grammar of the answer, None if it may be any text. Raises InvalidFormat.

    A forced call is exactly one call. With a `response_format` and tools that the model may choose, the answer has the
    format or is one call.
    """
    schema = format_schema(response_format)
    names = forced_tools(tools, tool_choice)
    if names is not None:
        return _HEAD + _rules([], [tool for tool in tools or () if _name_of(tool) in names])
    if schema is None:
        return None
    return _HEAD + _rules([schema], tools if tools and tool_choice != "none" else [])


def format_schema(response_format: Any) -> dict[str, Any] | None:
    """Returns the JSON schema of an answer, None if it may be any text. Raises InvalidFormat."""
    if response_format is None:
        return None
    param = "response_format"
    if not isinstance(response_format, dict):
        raise InvalidFormat("response_format must be an object", param)
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise InvalidFormat("response_format.json_schema.schema must be an object: a JSON schema", param)
            return schema
        case other:
            raise InvalidFormat(f"response_format.type must be text, json_object or json_schema, not {other!r}", param)


def forced_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> set[str] | None:
    """Returns the names of the tools of which one must be called, None if none has to be. Raises InvalidFormat."""
    if tool_choice in (None, "none", "auto"):
        return None
    param = "tool_choice"
    names = {_name_of(tool) for tool in tools or ()}
    if not names:
        raise InvalidFormat("tool_choice forces a tool, but the request has no tools", param)
    if tool_choice == "required":
        return names
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidFormat(
            'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": ...}}', param
        )
    if name not in names:
        raise InvalidFormat(f"tool_choice names {name!r}; the tools are {', '.join(sorted(names))}", param)
    return {name}


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidFormat("every tool needs function.name: letters, digits, _ . and -, at most 64", "tools")
    return name


def _parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. Arguments that the schema neither declares nor allows by name are left
    out: a function would refuse them."""
    schema = tool["function"].get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    if not isinstance(schema, dict):
        raise InvalidFormat(f"the parameters of the tool {_name_of(tool)} must be an object: a JSON schema", "tools")
    open_ended = any(key in schema for key in ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf"))
    closed = {} if open_ended or "properties" not in schema else {"additionalProperties": False}
    return {"type": "object"} | schema | closed


def _rules(schemas: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rules: the answer has one of the schemas, or is a call of one of the tools. Each schema is a document
    of its own, to which its references belong."""
    rules, choices = [], []
    for number, schema in enumerate(schemas):
        choices.append(f"answer{number}")
        rules.append(f"answer{number}: {_json_rule(schema)}")
    tail = json.dumps(f"}}\n{CLOSED}")
    for number, tool in enumerate(tools):
        head = json.dumps(f'{OPENED}\n{{"name": {json.dumps(_name_of(tool))}, "arguments": ')
        choices.append(f"call{number}")
        rules.append(f"call{number}: {head} arguments{number} {tail}")
        rules.append(f"arguments{number}: {_json_rule(_parameters_of(tool))}")
    return "\n".join([f"start: {' | '.join(choices)}", *rules]) + "\n"


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=True)
