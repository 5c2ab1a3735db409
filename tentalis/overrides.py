"""Settings given one by one on a command line: `loss.rl_weight=0`."""

from collections.abc import Sequence
from typing import Any


class BadOverride(ValueError):
    """What was given is no setting; the message quotes it."""


def with_overrides(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of nested settings with each `part.key=value` put in; values are read as YAML. Which names there are is
    for whoever validates the result.

    Raises BadOverride.
    """
    import yaml

    result = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for text in overrides:
        name, equals, value = text.partition("=")
        *parts, key = name.split(".")
        if not equals or not all((*parts, key)):
            raise BadOverride(f"`{text}` is no setting: name=value is expected, as loss.rl_weight=0.5")
        place = result
        for part in parts:
            inner = place.get(part)
            if inner is not None and not isinstance(inner, dict):
                raise BadOverride(f"`{text}`: `{part}` is a setting, not a part that has some")
            place[part] = dict(inner or {})
            place = place[part]
        try:
            place[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise BadOverride(f"`{text}`: the value is not YAML: {error}") from error
    return result
