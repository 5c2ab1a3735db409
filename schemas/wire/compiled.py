"""Encoders and decoders of the records, generated from their .avsc files and pydantic models.

fastavro and pydantic interpret a schema at run time. For the schemas that this code ships, straight-line Python is
generated once per record instead: from bytes to a validated record and back, without a dict in between. It takes a
fraction of the time, but does not explain errors:

- A decoder accepts a record only if fastavro and pydantic would both accept it, and returns an equal one. For anything
  else it raises `Unsure`, and the caller falls back to those two, which name the error.
- An encoder writes the bytes that fastavro would write.

A property test checks both, with records of all kinds and with damaged bytes. An unsupported constraint or schema
construct raises TypeError when the record is compiled: nothing goes unchecked.
"""

import json
import struct
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, TypeVar

import annotated_types
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from schemas.records import RECORDS, Record, RecordPart, base
from schemas.wire import avro

MOST_ITEMS = 100_000
"""Limit of items in all arrays and maps of one record; decoded, each takes about a kilobyte."""
REPEATING = frozenset(
    {"policy", "environment", "n_samples", "terms", "manager_id", "run_id", "logprobs_mode", "sampling"}
)
"""Fields that are the same in many records. A decoder reads a run of them once and caches it by its bytes."""
START_BYTES, LONGEST_RUN, MOST_RUNS = 12, 512, 1024


class Unsure(Exception):
    """The bytes are not a record in the usual encoding, or not a valid one."""


R = TypeVar("R", bound=RecordPart)
Decoder = Callable[[bytes], Record]
"""Avro body -> record. Raises Unsure."""
Encoder = Callable[[Record, bytes], bytes]
"""(record, prefix) -> bytes."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The decoder and encoder of a record, and their source."""

    decode: Decoder
    encode: Encoder
    source: str


def more(data: bytes, at: int) -> tuple[int, int]:
    """Reads an Avro varint: its value, still zigzag-encoded, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                raise Unsure
            return value, at
        shift += 7
        if shift > 63:
            raise Unsure


def size(data: bytes, at: int) -> tuple[int, int]:
    """Like `more`, for a length or a count."""
    value, second = data[at], data[at + 1]
    if value > 127 and second < 128:
        value, at = value & 127 | second << 7, at + 2
    else:
        value, at = more(data, at)
    if value & 1:
        raise Unsure
    return value, at


class Runs(dict[bytes, tuple[bytes, tuple[Any, ...], int, int]]):
    """A cache of decoded runs of fields, by their first bytes: (bytes, values, number of bytes, number of items)."""

    def learn(self, run: bytes, values: tuple[Any, ...], items: int) -> None:
        """Caches a run if it is short; the cache is small, because the bytes come from outside."""
        if len(run) <= LONGEST_RUN:
            if len(self) >= MOST_RUNS:
                self.clear()
            self[run[:START_BYTES]] = run, values, len(run), items


@lru_cache(4096)
def varint(value: int) -> bytes:
    """Encodes an integer as an Avro varint. Raises OverflowError past 64 bits, as fastavro does.

    The cache is small, because the values that repeat are the timestamps of one task. A large one would grow for half
    an hour, and look like a memory leak.
    """
    if not -(2**63) <= value < 2**63:
        raise OverflowError(f"{value} is out of the 64 bits of an Avro long")
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def trusted(model: type[R], **fields: Any) -> R:
    """Builds a record without validation, from values of validated records; every field must be given."""
    record = object.__new__(model)
    object.__setattr__(record, "__dict__", fields)
    object.__setattr__(record, "__pydantic_fields_set__", set(fields))
    object.__setattr__(record, "__pydantic_extra__", None)
    object.__setattr__(record, "__pydantic_private__", None)
    return record


COMMON = {
    "more": more,
    "size": size,
    "varint": varint,
    "VARINTS": [varint(value) for value in range(16384)],
    "Unsure": Unsure,
    "double": struct.Struct("<d"),
    "new": object.__new__,
    "put": object.__setattr__,
}


@cache
def compiled(name: str) -> Compiled:
    """The compiled functions of a record that this code ships. Raises KeyError for an unknown name."""
    schema, model = json.loads(avro.current(name).text), RECORDS[name]
    code = _Code(schema)
    source = code.decoder(schema, model) + "\n\n" + code.encoder(schema, model)
    scope: dict[str, Any] = COMMON | code.names
    exec(compile(source, f"<generated for {name}>", "exec"), scope)
    return Compiled(scope["decode"], scope["encode"], source)


class _Code:
    """Generates the source for one record; `names` holds the objects that the source refers to."""

    def __init__(self, schema: Any) -> None:
        self.names: dict[str, Any] = {}
        self._schemas: dict[str, Any] = {}
        self._collect(schema)
        self._lines: list[str] = []
        self._depth = 0
        self._count = 0
        self._in_run = False

    def decoder(self, schema: Any, model: type[BaseModel]) -> str:
        self._lines, self._depth = ["def decode(data):", f"    at, left = 0, {2 * MOST_ITEMS}", "    try:"], 2
        result = self._read_record(schema, model)
        self._line("if at != len(data): raise Unsure")
        self._line(f"return {result}")
        self._lines.append("    except (IndexError, KeyError, ValueError, error) as cause: raise Unsure from cause")
        self.names["error"] = struct.error
        return "\n".join(self._lines)

    def encoder(self, schema: Any, model: type[BaseModel]) -> str:
        self._lines, self._depth = ["def encode(record, prefix):"], 1
        self._line("out = bytearray(prefix)")
        self._write(schema, model, "record")
        self._line("return bytes(out)")
        return "\n".join(self._lines)

    # --- schemas ----------------------------------------------------------------------------------------------------

    def _collect(self, schema: Any) -> None:
        if isinstance(schema, list):
            for branch in schema:
                self._collect(branch)
        elif isinstance(schema, dict):
            if "name" in schema and schema["type"] in ("record", "enum"):
                self._schemas[schema["name"]] = schema
            for inner in ("items", "values"):
                self._collect(schema.get(inner))
            for field in schema.get("fields", ()):
                self._collect(field["type"])

    def _resolved(self, schema: Any) -> tuple[str, Any]:
        """(kind, schema) with named types resolved; the kind of a union is `union`."""
        if isinstance(schema, list):
            return "union", schema
        if isinstance(schema, str):
            named = self._schemas.get(schema.rpartition(".")[2])
            return (schema, None) if named is None else (named["type"], named)
        kind = schema["type"]
        return kind if isinstance(kind, str) else self._resolved(kind)[0], schema

    # --- lines ------------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def _variable(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _name(self, value: Any, hint: str) -> str:
        name = f"{hint}_{self._variable('')}"
        self.names[name] = value
        return name

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read_record(self, schema: Any, model: type[BaseModel]) -> str:
        fields: dict[str, str] = {}
        for repeating, group in groupby(schema["fields"], lambda field: field["name"] in REPEATING):
            run = list(group)
            if repeating and len(run) > 1 and not self._in_run:
                self._read_run(run, model, fields)
            else:
                self._read_fields(run, model, fields)
        if fields.keys() != model.model_fields.keys():
            raise TypeError(f"the fields of {model.__name__} differ from those of its schema")
        result = self._variable("r")
        self._line(f"{result} = new({self._name(model, 'Model')})")
        self._line(f"put({result}, '__dict__', {{{', '.join(f'{name!r}: {v}' for name, v in fields.items())}}})")
        self._line(f"put({result}, '__pydantic_fields_set__', {self._name(set(fields), 'fields')})")
        self._line(f"put({result}, '__pydantic_extra__', None); put({result}, '__pydantic_private__', None)")
        decorators = model.__pydantic_decorators__
        if decorators.field_validators or decorators.validators or decorators.root_validators:
            raise TypeError(f"{model.__name__} has field validators as methods, which are not supported")
        for validator in decorators.model_validators.values():
            if validator.info.mode != "after":
                raise TypeError(f"{model.__name__}: only model validators of mode 'after' are supported")
            self._line(f"{self._name(validator.func, 'check')}({result})")
        return result

    def _read_fields(self, run: Iterable[Any], model: type[BaseModel], fields: dict[str, str]) -> None:
        for field in run:
            info = model.model_fields[field["name"]]
            fields[field["name"]] = self._read(field["type"], info.annotation, list(info.metadata))

    def _read_run(self, run: list[Any], model: type[BaseModel], fields: dict[str, str]) -> None:
        runs, began, had = self._name(Runs(), "runs"), self._variable("at"), self._variable("left")
        read: dict[str, str] = {}
        self._line(f"k = {runs}.get(data[at:at + {START_BYTES}])")
        known = len(self._lines)
        self._line("else:")
        self._depth += 1
        self._in_run = True
        self._line(f"{began}, {had} = at, left")
        self._read_fields(run, model, read)
        values = f"({', '.join(read.values())},)"
        self._line(f"{runs}.learn(data[{began}:at], {values}, {had} - left)")
        self._in_run = False
        self._depth -= 1
        self._lines[known:known] = [
            "    " * self._depth + line
            for line in (
                "if k is not None and data.startswith(k[0], at):",
                f"    _, {values}, n, count = k; at += n; left -= count",
                "    if left < 0: raise Unsure",
            )
        ]
        fields |= read

    def _read(self, schema: Any, annotation: Any, metadata: list[Any]) -> str:
        annotation = _bare(annotation, metadata)
        kind, schema = self._resolved(schema)
        match kind:
            case "union":
                return self._read_optional(schema, annotation, metadata)
            case "record":
                _nothing_left(metadata)
                return self._read_record(schema, annotation)
            case "array":
                return self._read_array(schema, annotation, metadata)
            case "map":
                return self._read_map(schema, annotation, metadata)
        result = self._variable()
        match kind:
            case "string" | "bytes":
                self._read_bytes(result, kind, metadata)
                return result
            case "int" | "long":
                self._line("n = data[at]")
                self._line("if n > 127: n, at = more(data, at)")
                self._line("else: at += 1")
                self._line(f"{result} = n >> 1 ^ -(n & 1)")
            case "double":
                self._line(f"{result} = double.unpack_from(data, at)[0]; at += 8")
            case "boolean":
                self._line(f"{result} = {self._name({0: False, 1: True}, 'booleans')}[data[at]]; at += 1")
            case "enum":
                members = {2 * place: annotation(symbol) for place, symbol in enumerate(schema["symbols"])}
                self._line(f"{result} = {self._name(members, 'members')}[data[at]]; at += 1")
            case _:
                raise TypeError(f"no decoder for the Avro type {kind!r}")
        self._check(result, metadata)
        return result

    def _read_bytes(self, result: str, kind: str, metadata: list[Any]) -> None:
        self._line("n = data[at]")
        self._line("if n & 129: n, at = size(data, at)")
        self._line("else: at += 1")
        for item in list(metadata):
            # A check of the length needs no value: it is done first.
            if isinstance(item, AfterValidator) and item.func in (base.check_int32s, base.check_float32s):
                self._line("if n & 6: raise Unsure")
                metadata.remove(item)
            elif isinstance(item, annotated_types.MinLen) and item.min_length == 1:
                self._line("if not n: raise Unsure")
                metadata.remove(item)
        _nothing_left(metadata)
        decoded = ".decode()" if kind == "string" else ""
        self._line(f"{result} = data[at:(at := at + (n >> 1))]{decoded}")

    def _read_optional(self, schema: list[Any], annotation: Any, metadata: list[Any]) -> str:
        null, other, inner = _optional(schema, annotation)
        result = self._variable()
        self._line("n = data[at]; at += 1")
        self._line(f"if n == {2 * null}: {result} = None")
        self._line(f"elif n == {2 * (1 - null)}:")
        self._depth += 1
        self._line(f"{result} = {self._read(other, inner, metadata)}")
        self._depth -= 1
        self._line("else: raise Unsure")
        return result

    def _read_array(self, schema: Any, annotation: Any, metadata: list[Any]) -> str:
        result, count = self._variable(), self._variable("n")
        inner = typing.get_args(annotation)[0]
        self._line(f"{result} = ()")
        self._blocks(count)
        self._line(f"{result} = []")
        self._line(f"for _ in range({count} >> 1):")
        self._depth += 1
        self._line(f"{result}.append({self._read(schema['items'], inner, [])})")
        self._depth -= 1
        self._line(f"{result} = tuple({result})")
        self._end_of_blocks()
        for item in list(metadata):
            if isinstance(item, annotated_types.MinLen):
                self._line(f"if len({result}) < {item.min_length}: raise Unsure")
                metadata.remove(item)
        _nothing_left(metadata)
        return result

    def _read_map(self, schema: Any, annotation: Any, metadata: list[Any]) -> str:
        result, count, key = self._variable(), self._variable("n"), self._variable("k")
        _nothing_left(metadata)
        self._line(f"{result} = {{}}")
        self._blocks(count)
        self._line(f"for _ in range({count} >> 1):")
        self._depth += 1
        self._read_bytes(key, "string", [])
        self._line(f"{result}[{key}] = {self._read(schema['values'], typing.get_args(annotation)[1], [])}")
        self._depth -= 1
        self._end_of_blocks()
        return result

    def _blocks(self, count: str) -> None:
        """Opens the body of an array or map: one block, as all usual writers write it, and the end marker."""
        self._line(f"{count} = data[at]")
        self._line(f"if {count} & 129: {count}, at = size(data, at)")
        self._line("else: at += 1")
        self._line(f"if {count}:")
        self._depth += 1
        self._line(f"left -= {count}")
        self._line("if left < 0: raise Unsure")

    def _end_of_blocks(self) -> None:
        self._line("if data[at]: raise Unsure")
        self._line("at += 1")
        self._depth -= 1

    def _check(self, value: str, metadata: list[Any]) -> None:
        for item in metadata:
            match item:
                case AfterValidator(func=base.check_finite):
                    self._line(f"if {value} - {value} != 0.0: raise Unsure")
                case annotated_types.Ge(ge=bound):
                    self._line(f"if not {value} >= {bound!r}: raise Unsure")
                case annotated_types.Gt(gt=bound):
                    self._line(f"if not {value} > {bound!r}: raise Unsure")
                case annotated_types.Le(le=bound):
                    self._line(f"if not {value} <= {bound!r}: raise Unsure")
                case annotated_types.Lt(lt=bound):
                    self._line(f"if not {value} < {bound!r}: raise Unsure")
                case _:
                    _nothing_left([item])

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, schema: Any, annotation: Any, value: str) -> None:
        annotation = _bare(annotation, [])
        kind, schema = self._resolved(schema)
        match kind:
            case "record":
                fields = self._variable("d")
                self._line(f"{fields} = {value}.__dict__")
                for field in schema["fields"]:
                    inner = annotation.model_fields[field["name"]].annotation
                    self._write(field["type"], inner, f"{fields}[{field['name']!r}]")
            case "union":
                null, other, inner = _optional(schema, annotation)
                self._line(f"o = {value}")
                self._line(f"if o is None: out.append({2 * null})")
                self._line("else:")
                self._depth += 1
                self._line(f"out.append({2 * (1 - null)})")
                self._write(other, inner, "o")
                self._depth -= 1
            case "array" | "map":
                self._write_items(kind, schema, annotation, value)
            case "string" | "bytes":
                self._line(f"b = {value}{'.encode()' if kind == 'string' else ''}; n = len(b)")
                self._line("out += VARINTS[n] if n < 16384 else varint(n)")
                self._line("out += b")
            case "int" | "long":
                self._line(f"n = {value}")
                self._line("out += VARINTS[n] if 0 <= n < 16384 else varint(n)")
            case "double":
                self._line(f"out += double.pack({value})")
            case "boolean":
                self._line(f"out.append({value})")
            case "enum":
                places = {annotation(symbol): 2 * place for place, symbol in enumerate(schema["symbols"])}
                self._line(f"out.append({self._name(places, 'places')}[{value}])")
            case _:
                raise TypeError(f"no encoder for the Avro type {kind!r}")

    def _write_items(self, kind: str, schema: Any, annotation: Any, value: str) -> None:
        items, item = self._variable(), self._variable("i")
        self._line(f"{items} = {value}")
        self._line(f"if {items}:")
        self._depth += 1
        self._line(f"out += varint(len({items}))")
        if kind == "array":
            self._line(f"for {item} in {items}:")
            self._depth += 1
            self._write(schema["items"], typing.get_args(annotation)[0], item)
        else:
            key = self._variable("k")
            self._line(f"for {key}, {item} in {items}.items():")
            self._depth += 1
            self._write("string", str, key)
            self._write(schema["values"], typing.get_args(annotation)[1], item)
        self._depth -= 2
        self._line("out.append(0)")


def _bare(annotation: Any, metadata: list[Any]) -> Any:
    """Strips `Annotated` from a type and appends its arguments to `metadata`."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *added = typing.get_args(annotation)
        for item in added:
            metadata += item.metadata if isinstance(item, FieldInfo) else [item]
    return annotation


def _optional(schema: list[Any], annotation: Any) -> tuple[int, Any, Any]:
    """Splits an optional value's union: (index of null, the other branch, its type)."""
    if len(schema) != 2 or "null" not in schema or typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        raise TypeError(f"only unions of null and one other type are supported, not {schema} ({annotation})")
    null = schema.index("null")
    (inner,) = (arg for arg in typing.get_args(annotation) if arg is not type(None))
    return null, schema[1 - null], inner


def _nothing_left(metadata: list[Any]) -> None:
    if metadata:
        raise TypeError(f"constraints that no generated decoder checks: {metadata}")
