"""Names of configured scorers: a setting that changes verdicts changes the name, and with it the ids of all Scores."""

import json

from pydantic import BaseModel

from schemas.ids import sha256_hex
from tentalis.rewards.chat import ChatEndpoint

_DIGEST_CHARS = 8
_EXCLUDED_FIELDS = {"judge", "time_limit_s", "tokenizer"}


def versioned(version: str, settings: BaseModel, endpoint: ChatEndpoint | None = None, *more: object) -> str:
    """Returns `version` with a digest of everything that a verdict depends on.

    The digest covers the settings, the model with its extra request fields, and `more` (such as prompts). It excludes
    the access to the model (URL, key, time limits), the model's name in the file of scorers, and file paths.
    """
    identity = [
        settings.model_dump(mode="json", exclude=_EXCLUDED_FIELDS),
        None if endpoint is None else [endpoint.model, endpoint.extra],
        *more,
    ]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{version}+{sha256_hex(text.encode())[:_DIGEST_CHARS]}"
