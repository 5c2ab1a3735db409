"""Derives the Avro schema that a pydantic twin stands for, so that the parity test can hold it against the .avsc."""

import types
import typing
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

NAMESPACE = "tentalis"


def _extra(metadata: list[Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo) and isinstance(item.json_schema_extra, dict):
            extra |= item.json_schema_extra
    return extra


def avro_type(annotation: Any, seen: set[str]) -> Any:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        flat = [item for item in metadata]
        extra = _extra(flat)
        if "avro" in extra:
            return extra["avro"]
        inner = avro_type(base, seen)
        return {"type": inner, "logicalType": extra["logicalType"]} if "logicalType" in extra else inner
    if origin in (typing.Union, types.UnionType):
        others = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        assert len(others) == 1, annotation
        return ["null", avro_type(others[0], seen)]
    if origin is tuple:
        return {"type": "array", "items": avro_type(typing.get_args(annotation)[0], seen)}
    if origin is dict:
        return {"type": "map", "values": avro_type(typing.get_args(annotation)[1], seen)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return avro_record(annotation, seen)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        if annotation.__name__ in seen:
            return f"{NAMESPACE}.{annotation.__name__}"
        seen.add(annotation.__name__)
        return {
            "type": "enum",
            "name": annotation.__name__,
            "namespace": NAMESPACE,
            "symbols": [member.value for member in annotation],
            "default": "unknown",
        }
    return {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}[annotation]


def _default(value: Any) -> Any:
    match value:
        case BaseModel():
            return {name: _default(getattr(value, name)) for name in type(value).model_fields}
        case Enum():
            return value.value
        case tuple():
            return [_default(item) for item in value]
        case bytes():
            return value.decode("latin-1")
        case _:
            return value


def avro_record(model: type[BaseModel], seen: set[str] | None = None) -> Any:
    seen = set() if seen is None else seen
    if model.__name__ in seen:
        return f"{NAMESPACE}.{model.__name__}"
    seen.add(model.__name__)
    hints = typing.get_type_hints(model, include_extras=True)
    fields = []
    for name, info in model.model_fields.items():
        field: dict[str, Any] = {"name": name, "type": avro_type(hints[name], seen)}
        if info.default is not PydanticUndefined:
            field["default"] = _default(info.default)
        # Avro: the default of a union belongs to its first branch; an optional whose default is a value has that first.
        if isinstance(field["type"], list) and field.get("default") is not None:
            field["type"] = [field["type"][1], "null"]
        fields.append(field)
    return {"type": "record", "name": model.__name__, "namespace": NAMESPACE, "fields": fields}
