"""The configuration as a file that explains itself: every setting with its value and what it means."""

import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config import TrainerConfig
from trainer.config_file import section_of

WIDTH = 110


def commented(config: TrainerConfig | None = None) -> str:
    """YAML with a comment above each setting: the values of a configuration, or the defaults (and for what has none,
    an example). It reads back as that configuration."""
    values = {} if config is None else config.model_dump(mode="json")
    return "\n".join(_lines(TrainerConfig, values, "")).lstrip("\n") + "\n"


def _lines(model: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    fields = model.model_fields.items()
    # Sections last: what stands below one would otherwise read as part of it.
    for name, field in sorted(fields, key=lambda item: section_of(item[1].annotation) is not None):
        section = section_of(field.annotation)
        value = values[name] if name in values else _default(field)
        if not indent or section is not None:
            yield ""
        if section is not None:
            yield from _comment(section.__doc__ or "", indent)
        yield from _comment((field.description or "") + _bounds(field), indent)
        if section is not None and isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(section, value, indent + "  ")
        else:
            yield f"{indent}{name}: {_inline(value)}"


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return (field.examples or [""])[0]
    default = field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def _inline(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), WIDTH - len(indent)):
        yield f"{indent}# {line}"


def _bounds(field: FieldInfo) -> str:
    """What values it takes, where the type says more than its description."""
    kinds = [each for each in (get_args(field.annotation) or (field.annotation,)) if each is not type(None)]
    if get_origin(field.annotation) is Literal:
        kinds = [field.annotation]
    # A type that takes anything else beside its words says so in its description.
    choices = get_args(kinds[0]) if len(kinds) == 1 and get_origin(kinds[0]) is Literal else ()
    said = [f"One of {', '.join(map(str, choices))}." if len(choices) > 1 else ""]
    if field.is_required():
        said.append("Required.")
    return "".join(f" {each}" for each in said if each)
