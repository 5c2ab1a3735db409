"""The base classes of all records, and the types of their fields."""

import math
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def check_finite(value: float) -> float:
    """Rejects NaN and infinities."""
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def check_int32s(data: bytes) -> bytes:
    """Rejects bytes that cannot be int32 values."""
    if len(data) % 4:
        raise ValueError(f"must hold little-endian int32 values, but has {len(data)} bytes, not a multiple of 4")
    return data


def check_float32s(data: bytes) -> bytes:
    """Rejects bytes that cannot be float32 values."""
    if len(data) % 4:
        raise ValueError(f"must hold little-endian float32 values, but has {len(data)} bytes, not a multiple of 4")
    return data


Millis = Annotated[int, Field(json_schema_extra={"logicalType": "timestamp-millis"})]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31, json_schema_extra={"avro": "int"})]
Int32s = Annotated[bytes, AfterValidator(check_int32s), Field(json_schema_extra={"logicalType": "int32-le"})]
Float32s = Annotated[bytes, AfterValidator(check_float32s), Field(json_schema_extra={"logicalType": "float32-le"})]
Mask = Annotated[bytes, Field(json_schema_extra={"logicalType": "uint8-mask"})]
Finite = Annotated[float, AfterValidator(check_finite)]
Reward = Annotated[float, AfterValidator(check_finite), Field(ge=-1.0, le=1.0)]
Unit = Annotated[float, AfterValidator(check_finite), Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]
"""A string that is not empty."""


class RecordPart(BaseModel):
    """A record that is nested in others and never on a topic by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Record(RecordPart):
    """A record on a topic."""

    ID_FIELD: ClassVar[str] = ""
    """The field with the event's id; empty if the key identifies the event."""

    @property
    def key(self) -> str:
        """The Kafka key."""
        raise NotImplementedError

    @property
    def event_id(self) -> str:
        """The id of the event, the same for all copies of the record."""
        return str(getattr(self, self.ID_FIELD)) if self.ID_FIELD else self.key
