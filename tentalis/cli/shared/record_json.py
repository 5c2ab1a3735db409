"""Converts records to readable JSON and back.

Token fields (`int32-le`, `float32-le`, `uint8-mask` bytes) are lists of numbers. float32 values have the fewest digits
that read back to the same bits; non-finite values are the strings "nan", "inf" and "-inf" (a field with a NaN of other
bits is base64). All other values are as in the Avro schema: times are milliseconds, enums their symbols.
`from_plain(type(r), to_plain(r)) == r`.
"""

from __future__ import annotations

import base64
import math
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas.records import RecordPart
from schemas.tensors import (
    FLOAT32,
    INT32,
    float32_bytes,
    float32_view,
    int32_bytes,
    int32_view,
    uint8_bytes,
    uint8_view,
)

R = TypeVar("R", bound=BaseModel)
_FORMATS = {"int32-le": INT32.itemsize, "float32-le": FLOAT32.itemsize, "uint8-mask": 1}


def _walk(annotation: Any) -> Iterator[Any]:
    """Yields an annotation and everything inside it: metadata of Annotated, branches of unions, items of tuples."""
    yield annotation
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType, tuple):
        for inner in typing.get_args(annotation):
            yield from _walk(inner)


@cache
def _fields(model: type[BaseModel]) -> tuple[dict[str, str], dict[str, type[BaseModel]]]:
    """Returns the token fields of a record type with their format, and its fields that hold other records."""
    tensors: dict[str, str] = {}
    nested: dict[str, type[BaseModel]] = {}
    for name, annotation in typing.get_type_hints(model, include_extras=True).items():
        if name not in model.model_fields:
            continue
        for item in _walk(annotation):
            if isinstance(item, FieldInfo) and isinstance(item.json_schema_extra, dict):
                logical = item.json_schema_extra.get("logicalType")
                if logical in _FORMATS:
                    tensors[name] = str(logical)
            elif isinstance(item, type) and issubclass(item, BaseModel):
                nested[name] = item
    return tensors, nested


def _number(value: Any) -> float | str:
    return float(str(value)) if math.isfinite(value) else str(value)


def _numbers(data: bytes, logical: str) -> list[Any] | str:
    match logical:
        case "int32-le":
            return [int(value) for value in int32_view(data)]
        case "float32-le":
            numbers = [_number(value) for value in float32_view(data)]
            # NaNs have many bit patterns: if "nan" does not restore the same bits, the field becomes base64.
            return numbers if float32_bytes([float(n) for n in numbers]) == data else base64.b64encode(data).decode()
        case _:
            return [int(value) for value in uint8_view(data)]


def _bytes(value: Any, logical: str) -> bytes:
    if isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if not isinstance(value, list):
        raise TypeError(f"got a {type(value).__name__}")
    match logical:
        case "int32-le":
            return int32_bytes(value)
        case "float32-le":
            return float32_bytes([float(item) for item in value])
        case _:
            return uint8_bytes(value)


def to_plain(value: Any, logical: str | None = None) -> Any:
    """Converts a record, or a value in one, to JSON values."""
    match value:
        case RecordPart():
            tensors, _ = _fields(type(value))
            return {name: to_plain(getattr(value, name), tensors.get(name)) for name in type(value).model_fields}
        case bytes():
            return _numbers(value, logical) if logical else base64.b64encode(value).decode()
        case list() | tuple():
            return [to_plain(item) for item in value]
        case dict():
            return {key: to_plain(item) for key, item in value.items()}
        case _:
            return value


def _prepared(model: type[BaseModel], data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    tensors, nested = _fields(model)
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name in tensors and value is not None:
            try:
                found[name] = _bytes(value, tensors[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{name}: not a list of {tensors[name]} numbers, nor base64 of them: {error}"
                ) from error
        elif name in nested and isinstance(value, list):
            found[name] = [_prepared(nested[name], item) for item in value]
        else:
            found[name] = _prepared(nested[name], value) if name in nested else value
    return found


def from_plain(model: type[R], data: Any) -> R:
    """Returns the record of JSON values; token fields may also be base64. Raises ValueError (including pydantic's)."""
    return model.model_validate(_prepared(model, data))
