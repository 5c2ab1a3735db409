"""Reads hand-written YAML settings; a duplicate key is an error."""

from pathlib import Path
from typing import Any

import yaml

from tentalis.text.settings_text import settings_text

_MERGE = "tag:yaml.org,2002:merge"


class BadYaml(ValueError):
    """A file without valid settings. The message gives the place of the error, and not its line, which may hold a
    secret."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for node_of_key, _ in node.value:
            if node_of_key.tag == _MERGE:
                continue
            key = self.construct_object(node_of_key, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key}: duplicate key", node_of_key.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, holds: str) -> dict[Any, Any]:
    """Reads the mapping in a file; `holds` describes its expected content. Raises BadYaml, which names the file."""
    try:
        text = settings_text(path)
    except ValueError as error:
        raise BadYaml(str(error)) from error
    return mapping_in(text, str(path), holds)


def mapping_in(text: str, where: str, holds: str) -> dict[Any, Any]:
    """Parses the mapping in a text from `where`; `holds` describes the expected keys. Raises BadYaml, with `where`."""
    data = value_in(text, where)
    if not isinstance(data, dict):
        raise BadYaml(f"{where}: expected a mapping with {holds}, not {type(data).__name__}")
    return data


def value_in(text: str, where: str) -> Any:
    """Parses a YAML text from `where`. Raises BadYaml, with `where`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(filter(None, (error.problem, error.context)))
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise BadYaml(f"{where}: not YAML: {what}{place}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadYaml(f"{where}: not YAML: {' '.join(str(error).split())}") from error
