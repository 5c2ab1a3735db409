"""state.json of a checkpoint: its fields, and a digest of them by which damage is noticed. The trainer writes it, and
commands look at it."""

import json
from collections.abc import Mapping
from typing import Any

from schemas.ids import sha256_hex

DIGEST = "digest"
"""The field of state.json with the digest of its other fields."""


class DigestMismatch(ValueError):
    """The fields of a state.json are not those that were written."""

    def __init__(self) -> None:
        super().__init__("it does not match its own digest: the file was damaged or changed")


def digest_of(fields: Mapping[str, Any]) -> str:
    """Returns the digest of the fields, in hex."""
    return sha256_hex(json.dumps(fields, sort_keys=True).encode())


def state_fields(data: bytes) -> dict[str, Any]:
    """Returns the fields of a state.json with this content, without the digest. Checkpoints of 0.1.0 have none. Raises
    DigestMismatch, and ValueError for other content."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    digest = fields.pop(DIGEST, None)
    if digest is not None and digest != digest_of(fields):
        raise DigestMismatch
    return fields
