"""Ids are derived, never drawn, wherever a retry could draw again: the same cause has the same id."""

import hashlib
import json
import uuid
from collections.abc import Sequence

NAMESPACE = uuid.UUID("6f0d9d3e-52d4-5b0e-9a53-7e3f0e1f5a11")


def derived_id(kind: str, *parts: str | int | float | Sequence[object] | None) -> str:
    """uuid5 of the kind and its parts; parts are serialised as canonical JSON, so ("a", "b") and ("ab",) differ."""
    return str(uuid.uuid5(NAMESPACE, json.dumps([kind, *parts], separators=(",", ":"), ensure_ascii=True)))


def sha256_hex(data: bytes) -> str:
    """sha256 as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def policy_name(policy: str, version: int) -> str:
    """The name of an immutable adapter: `policy@vN`."""
    return f"{policy}@v{version}"


def parse_policy_name(name: str) -> tuple[str, int]:
    """`policy@vN` -> (policy, N). Raises ValueError for anything else."""
    policy, at, version = name.rpartition("@v")
    if not at or not policy or not version.isdigit():
        raise ValueError(f"{name!r} is not an adapter name of the form policy@vN")
    return policy, int(version)
