"""Reads hand-written YAML settings; a duplicate key is an error."""

from pathlib import Path
from typing import Any

import yaml

from tentalis.text.settings_text import settings_text

DEEPEST = 100
"""The most levels of lists and mappings in each other."""

_MERGE = "tag:yaml.org,2002:merge"


class BadYaml(ValueError):
    """A file without valid settings. The message gives the place of the error, and not its line, which may hold a
    secret."""


class _Loader(yaml.SafeLoader):
    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        if self.indent < column:
            self._check_depth(len(self.indents))
        added: bool = super().add_indent(column)
        return added

    def _check_depth(self, depth: int) -> None:
        """Refuses a text before its depth makes the scanner slow."""
        if depth >= DEEPEST:
            problem = f"nested more deeply than {DEEPEST} levels"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # of the constructors of scalars
            problem = f"no valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for node_of_key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # else: refused below
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
