"""The digest of a rollout: sha256 over the fields that training reads.

It is independent of framing, schema version and provenance, so the same rollout that was exported, re-produced or moved
to another cluster has the same digest. The order of the fields is the contract: it is DIGEST_FIELDS below, each field
as its UTF-8 name, a zero byte, the length of its canonical bytes (8 bytes, big-endian), the bytes. Numbers are IEEE 754
doubles (big-endian), integers 8 bytes big-endian, null is the single byte `n`, booleans are `t` and `f`, token fields
are their own little-endian bytes, lists are the concatenation of their length-prefixed items.
"""

import hashlib
import struct
from typing import Any

from schemas.records import Part, Rollout

DIGEST_FIELDS = (
    "rollout_id",
    "policy",
    "environment",
    "token_ids",
    "loss_mask",
    "sampler_logprobs",
    "logprobs_mode",
    "temperature",
    "top_p",
    "top_k",
    "constrained",
    "policy_spans",
    "reward",
    "components",
    "n_requested",
    "n_closed",
    "group_mean",
    "group_std",
    "has_rl",
    "has_opd",
    "step_scores",
    "step_spans",
    "teacher_policy",
    "teacher_logprobs",
    "session_id",
    "turn_index",
)


def _canonical(value: Any) -> bytes:
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return struct.pack(">q", value)
        case float():
            return struct.pack(">d", value)
        case bytes():
            return value
        case str():
            return value.encode()
        case Part():
            return _canonical([getattr(value, name) for name in type(value).model_fields])
        case dict():
            return _canonical([item for name in sorted(value) for item in (name, value[name])])
        case list() | tuple():
            items = [_canonical(item) for item in value]
            return b"".join(struct.pack(">q", len(item)) + item for item in items)
        case _:
            raise TypeError(f"no canonical form for a {type(value).__name__} in a rollout digest")


def rollout_digest(rollout: Rollout) -> str:
    """sha256 (hex) over DIGEST_FIELDS of a rollout; the rollout's own `digest` field is not read."""
    nested = {"policy", "environment", "session_id", "turn_index"}
    sampling = {"temperature", "top_p", "top_k", "constrained"}
    sha = hashlib.sha256()
    for name in DIGEST_FIELDS:
        owner = rollout.head if name in nested else rollout.sampling if name in sampling else rollout
        data = _canonical(getattr(owner, name))
        sha.update(name.encode() + b"\0" + struct.pack(">q", len(data)) + data)
    return sha.hexdigest()


def with_digest(rollout: Rollout) -> Rollout:
    """The same rollout with its digest filled in."""
    return rollout.model_copy(update={"digest": rollout_digest(rollout)})


def digest_holds(rollout: Rollout) -> bool:
    """Whether the content still is what the digest says; a forgotten husk has no content to check."""
    return rollout.forgotten or rollout_digest(rollout) == rollout.digest


def record_digest(value: Part, exclude: set[str]) -> str:
    """sha256 (hex) of a record's canonical bytes without the named fields: for manifests and plans."""
    fields = [name for name in type(value).model_fields if name not in exclude]
    return hashlib.sha256(_canonical([item for name in fields for item in (name, getattr(value, name))])).hexdigest()
