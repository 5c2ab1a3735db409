"""The digest of a rollout: sha256 over the fields that training reads.

It is independent of framing, schema version and provenance, so the same rollout that was exported, re-produced or moved
to another cluster has the same digest. The order of the fields is the contract: it is DIGEST_FIELDS below, each field
as its UTF-8 name, a zero byte, the length of its canonical bytes (8 bytes, big-endian), the bytes. Numbers are IEEE 754
doubles (big-endian), integers 8 bytes big-endian, null is the single byte `n`, booleans are `t` and `f`, token fields
are their own little-endian bytes, lists are the concatenation of their length-prefixed items. Fields that were added
later (ADDED_FIELDS) follow in the same form if they differ from their default.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from schemas.ids import graded_sample
from schemas.records import RecordPart, Rollout

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

ADDED_FIELDS = ("n_rewarded", "topk", "topk_ids", "topk_logprobs")
"""Fields that were added later. They are hashed after those above and in this order, each only if it differs from its
default: so the digests of older records stay valid, and none of these fields can be set unnoticed."""


def _listed(items: Iterable[Any]) -> bytes:
    parts: list[bytes] = []
    for item in items:
        data = _canonical(item)
        parts += (_LONG(len(data)), data)
    return b"".join(parts)


_LONG = struct.Struct(">q").pack
_FORMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"n",
    bool: lambda value: b"t" if value else b"f",
    int: _LONG,
    float: struct.Struct(">d").pack,
    bytes: lambda value: value,
    str: str.encode,
    dict: lambda value: _listed(item for name in sorted(value) for item in (name, value[name])),
    list: _listed,
    tuple: _listed,
}


def _form(kind: type) -> Callable[[Any], bytes]:
    """The canonical form of a type that is not in _FORMS yet; it is added there."""
    if issubclass(kind, RecordPart):
        fields = tuple(kind.model_fields)
        form: Callable[[Any], bytes] = lambda value: _listed(getattr(value, name) for name in fields)  # noqa: E731
    elif issubclass(kind, str):
        form = str.encode
    else:
        raise TypeError(f"no canonical form for a {kind.__name__} in a rollout digest")
    _FORMS[kind] = form
    return form


def _canonical(value: Any) -> bytes:
    form = _FORMS.get(type(value)) or _form(type(value))
    return form(value)


def _places() -> list[tuple[bytes, Callable[[Rollout], Any]]]:
    nested = dict.fromkeys(("policy", "environment", "session_id", "turn_index"), "head.")
    nested |= dict.fromkeys(("temperature", "top_p", "top_k", "constrained"), "sampling.")
    return [(name.encode() + b"\0", attrgetter(nested.get(name, "") + name)) for name in DIGEST_FIELDS]


_PLACES = _places()
_ADDED = [(name.encode() + b"\0", attrgetter(name), Rollout.model_fields[name].get_default()) for name in ADDED_FIELDS]


def rollout_digest(rollout: Rollout) -> str:
    """sha256 (hex) over DIGEST_FIELDS of a rollout; the rollout's own `digest` field is not read."""
    parts: list[bytes] = []
    for name, value_of in _PLACES:
        data = _canonical(value_of(rollout))
        parts += (name, _LONG(len(data)), data)
    for name, value_of, default in _ADDED:
        value = value_of(rollout)
        if value != default:
            data = _canonical(value)
            parts += (name, _LONG(len(data)), data)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def with_digest(rollout: Rollout) -> Rollout:
    """The same rollout with its digest filled in."""
    return rollout.model_copy(update={"digest": rollout_digest(rollout)})


def digest_holds(rollout: Rollout) -> bool:
    """True if the content matches the digest; a redacted rollout has no content to check. The digest does not cover
    the task's id, by which groups are formed, but it covers the rollout's id, which begins with the task's id."""
    own = f"{rollout.head.task_id}/{rollout.sample_index}"
    key = rollout.rollout_id
    if key != own and not key.startswith(f"{own}/opd/") and graded_sample(key) != own:
        return False
    return rollout.forgotten or rollout_digest(rollout) == rollout.digest


ADDED_RECORD_FIELDS = frozenset({"environment", "baseline"})
"""Fields of manifests and plans that were added later: hashed only if they differ from their default."""


def record_digest(value: RecordPart, exclude: set[str]) -> str:
    """sha256 (hex) of a record's canonical bytes without the named fields: for manifests and plans."""
    fields = [
        name
        for name, field in type(value).model_fields.items()
        if name not in exclude and not (name in ADDED_RECORD_FIELDS and getattr(value, name) == field.get_default())
    ]
    return hashlib.sha256(_canonical([item for name in fields for item in (name, getattr(value, name))])).hexdigest()
