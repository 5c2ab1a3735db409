"""Derived ids. An id that a retry could generate again is derived, never random: the same cause has the same id."""

import hashlib
import json
import re
import uuid
from collections.abc import Sequence

NAMESPACE = uuid.UUID("6f0d9d3e-52d4-5b0e-9a53-7e3f0e1f5a11")

_quoted = json.encoder.encode_basestring_ascii
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode
_UUID5 = 5 << 76 | 0b10 << 62
_FREE = (1 << 128) - 1 & ~(0xF << 76 | 0b11 << 62)


def derived_id(kind: str, *parts: str | int | float | Sequence[object] | None) -> str:
    """uuid5 of the kind and its parts; parts are serialised as canonical JSON, so ("a", "b") and ("ab",) differ."""
    sha = hashlib.sha1(NAMESPACE.bytes, usedforsecurity=False)
    texts = [part for part in (kind, *parts) if type(part) is str]
    plain = len(texts) > len(parts)
    sha.update((f"[{','.join(map(_quoted, texts))}]" if plain else _json([kind, *parts])).encode())
    # The result of uuid.uuid5, in a third of the time.
    bits = int.from_bytes(sha.digest()[:16], "big") & _FREE | _UUID5
    text = f"{bits:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


GUESSED_SESSION = "auto-"
"""Prefix of the name of a session that the gateway guessed, because its client named none."""


def turn_task_id(session_id: str, session_event_id: str) -> str:
    """The id of the task that the application `sessions` makes from a main turn; arguments are ids on the log."""
    return derived_id("turn", session_id, session_event_id)


def rollout_task_id(rollout_id: str) -> str:
    """The id of the task of a rollout: `<task>/<sample>`, and after `/opd/` the id of a hint that came late, after
    `/grade/` that of a grade.

    >>> rollout_task_id("a/b/3/opd/x")
    'a/b'
    """
    sample = graded_sample(rollout_id) or rollout_id.partition("/opd/")[0]
    return sample.rpartition("/")[0]


_GRADED = re.compile(r"(.*/[0-9]+)/grade/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.DOTALL)


def graded_sample(rollout_id: str) -> str | None:
    """The sample, `<task>/<sample>`, whose reward a rollout replaces, because it is a grade that came late
    (`<task>/<sample>/grade/<half id>`); None for any other rollout.

    >>> graded_sample("a/b/3/grade/6f0d9d3e-52d4-5b0e-9a53-7e3f0e1f5a11")
    'a/b/3'
    """
    if "/grade/" not in rollout_id:
        return None
    found = _GRADED.fullmatch(rollout_id)
    return None if found is None else found[1]


def sha256_hex(data: bytes) -> str:
    """sha256 as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


_COUNTERFACTUAL = re.compile(r"(\.cf-[0-9a-f]{8})+\Z")


def counterfactual_name(name: str, digest: str) -> str:
    """The name of a counterfactual of a run or a policy; `digest`: of what is changed, in hex.

    >>> counterfactual_name("assistant", "0123456789")
    'assistant.cf-01234567'
    """
    return f"{name}.cf-{digest[:8]}"


def original_name(name: str) -> str:
    """The run or policy that a counterfactual began with; any other name is returned unchanged.

    >>> original_name("assistant.cf-01234567")
    'assistant'
    """
    return _COUNTERFACTUAL.sub("", name)


def policy_name(policy: str, version: int) -> str:
    """The name of an immutable adapter: `policy@vN`."""
    return f"{policy}@v{version}"


def parse_policy_name(name: str) -> tuple[str, int]:
    """`policy@vN` -> (policy, N). Raises ValueError for anything else."""
    policy, at, version = name.rpartition("@v")
    if not at or not policy or not version.isdigit():
        raise ValueError(f"{name!r} is not an adapter name of the form policy@vN")
    return policy, int(version)
