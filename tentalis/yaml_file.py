"""Settings in YAML, as people write them by hand: a key that is there twice is a mistake, not the last of the two."""

from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class BadYaml(ValueError):
    """A file that holds no settings. The message says where it is wrong."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{', '.join(sorted(twice))}: there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, holds: str) -> dict[Any, Any]:
    """The mapping in a file; `holds` names what it should have. Raises BadYaml, which names the file."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise BadYaml(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadYaml(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise BadYaml(f"{path}: a mapping with {holds} is expected, not {type(data).__name__}")
    return data
