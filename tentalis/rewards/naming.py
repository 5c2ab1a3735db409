"""Names of scorers that are configured: what changes a verdict changes the name, and with it the ids of all Scores."""

import json

from pydantic import BaseModel

from schemas.ids import sha256_hex
from tentalis.rewards.chat import Endpoint

_DIGITS = 8
_ELSEWHERE = {"judge", "time_limit_s", "tokenizer"}


def versioned(version: str, settings: BaseModel, endpoint: Endpoint | None = None, *more: object) -> str:
    """`version` with a digest of everything that a verdict depends on: the settings, the model with what is sent to it,
    prompts and whatever else. Not of how the model is reached (URL, key, time limits), what it is called in the file,
    or where files lie.
    """
    said = [
        settings.model_dump(mode="json", exclude=_ELSEWHERE),
        None if endpoint is None else [endpoint.model, endpoint.extra],
        *more,
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return f"{version}+{sha256_hex(text.encode())[:_DIGITS]}"
