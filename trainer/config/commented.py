"""Prints the configuration as a commented file: every setting with its value and its meaning."""

import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.file import section_of
from trainer.config.trainer_config import TrainerConfig

WIDTH = 110


def commented_yaml(config: TrainerConfig | None = None) -> str:
    """Returns YAML with a comment above each setting: the values of a configuration, or the defaults (an example where
    there is no default). Parsing it gives the same configuration."""
    values = {} if config is None else config.model_dump(mode="json")
    return "\n".join(_lines(TrainerConfig, values, "")).lstrip("\n") + "\n"


def _lines(model: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    fields = model.model_fields.items()
    # Sections last: a setting below a section would read as part of it.
    for name, field in sorted(fields, key=lambda item: section_of(item[1].annotation) is not None):
        section = section_of(field.annotation)
        value = values[name] if name in values else _default_value(field)
        if not indent or section is not None:
            yield ""
        if section is not None:
            yield from _comment(section.__doc__ or "", indent)
        yield from _comment((field.description or "") + _allowed_values(field), indent)
        if section is not None and isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(section, value, indent + "  ")
        else:
            yield f"{indent}{name}: {_inline_yaml(value)}"


def _default_value(field: FieldInfo) -> Any:
    if field.is_required():
        return (field.examples or [""])[0]
    default = field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def _inline_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), WIDTH - len(indent)):
        yield f"{indent}# {line}"


def _allowed_values(field: FieldInfo) -> str:
    """Returns the allowed values, where the type says more than the description."""
    types = [item for item in (get_args(field.annotation) or (field.annotation,)) if item is not type(None)]
    if get_origin(field.annotation) is Literal:
        types = [field.annotation]
    # A union of literals with other types lists them in its description.
    choices = get_args(types[0]) if len(types) == 1 and get_origin(types[0]) is Literal else ()
    notes = [f"One of {', '.join(map(str, choices))}." if len(choices) > 1 else ""]
    if field.is_required():
        notes.append("Required.")
    return "".join(f" {item}" for item in notes if item)
