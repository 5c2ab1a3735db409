"""Settings in YAML, as people write them by hand: a key that is there twice is a mistake, not the last of the two."""

from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class BadYaml(ValueError):
    """A file that holds no settings. The message says where it is wrong."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for node_of_key, _ in node.value:
            if node_of_key.tag == _MERGE:
                continue
            key = self.construct_object(node_of_key, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key}: there twice", node_of_key.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, holds: str) -> dict[Any, Any]:
    """The mapping in a file; `holds` names what it should have. Raises BadYaml, which names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadYaml(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return mapping_in(text, str(path), holds)


def mapping_in(text: str, where: str, holds: str) -> dict[Any, Any]:
    """The mapping in a text from `where`; `holds` names what it should have. Raises BadYaml, which says where."""
    data = value_in(text, where)
    if not isinstance(data, dict):
        raise BadYaml(f"{where}: a mapping with {holds} is expected, not {type(data).__name__}")
    return data


def value_in(text: str, where: str) -> Any:
    """What a text from `where` says. Raises BadYaml, which says where."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise BadYaml(f"{where}: not YAML: {error}") from error
