"""Token ids and log-probs as raw little-endian bytes, which numpy reads without copying.

Arrays of boxed Avro ints would dominate the decoding time; the `.avsc` files mark the byte fields with our own
`logicalType`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
UINT8 = np.dtype("u1")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


def int32_bytes(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """[n] integers -> 4n bytes, little-endian int32."""
    return np.ascontiguousarray(values, dtype=INT32).tobytes()


def float32_bytes(values: Sequence[float] | npt.NDArray[Any]) -> bytes:
    """[n] floats -> 4n bytes, little-endian float32."""
    return np.ascontiguousarray(values, dtype=FLOAT32).tobytes()


def uint8_bytes(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """[n] small integers (a mask) -> n bytes."""
    return np.ascontiguousarray(values, dtype=UINT8).tobytes()


def int32_view(data: bytes) -> Int32Array:
    """4n bytes -> read-only view [n] int32. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=INT32)


def float32_view(data: bytes) -> Float32Array:
    """4n bytes -> read-only view [n] float32. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=FLOAT32)


def uint8_view(data: bytes) -> UInt8Array:
    """n bytes -> read-only view [n] uint8."""
    return np.frombuffer(data, dtype=UINT8)
