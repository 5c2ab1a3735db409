"""Reads the state.json of a checkpoint, for commands. They are below the trainer, which writes it
(trainer/run/checkpoint.py)."""

import json
from pathlib import Path
from typing import Any

from schemas.ids import sha256_hex


class DamagedStateFile(ValueError):
    """A state.json is not a JSON object, or does not match its own digest."""


def state_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a state.json, without its digest. One of 0.1.0 has no digest, and is not compared. Raises
    DamagedStateFile, OSError."""
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedStateFile(f"{path} is not the state of a checkpoint: {error}") from error
    if not isinstance(fields, dict):
        raise DamagedStateFile(f"{path} is not the state of a checkpoint: it is not a JSON object")
    digest = fields.pop("digest", None)
    if digest not in (None, sha256_hex(json.dumps(fields, sort_keys=True).encode())):
        raise DamagedStateFile(f"{path} does not match its own digest: the file was damaged or changed")
    return fields
