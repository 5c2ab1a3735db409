"""API keys of episodes: a worker signs one for each attempt at an episode of a program, and the gateway checks it.

A key is `te-CLAIMS.SIGNATURE`, both base64url: the claims are JSON, the signature is their HMAC-SHA256 with a secret
that worker and gateway share. So the gateway needs no list of episodes, and any gateway can answer any call of one.
Pure.
"""

import base64
import binascii
import hashlib
import hmac
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.records import Sampling

PREFIX = "te-"
"""The beginning of the key of an episode. Keys of `tentalis keys` begin with `tk-`."""
CLOCK_SLACK_S = 120.0
"""Tolerated difference between the clocks of worker and gateway, in seconds."""


class BadEpisodeKey(ValueError):
    """A key that is not one of an episode, or not any more. The message has the reason."""


class EpisodeGrant(BaseModel):
    """The permission of one attempt at an episode: its calls are answered by one policy and belong to one session.

    Attributes:
        session_id: the session on the log.
        task_id: the task, by which assignments choose a version.
        policy: the policy that answers, whatever model the program names.
        environment: the environment of the task.
        worker_id: the worker that plays.
        user_id: the user of the task, None without one.
        least_version: the version that the worker's server served when the attempt began; no older one answers.
        sampling: the sampling of the task, in place of the program's own. `max_tokens` bounds each turn.
        max_turns: calls that the gateway answers; None: without a bound.
        expires: end of the permission, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: Annotated[str, Field(min_length=1, max_length=500)]
    task_id: str
    policy: str
    environment: str
    worker_id: str
    user_id: str | None = None
    least_version: int | None = None
    sampling: Sampling
    max_turns: Annotated[int, Field(ge=1)] | None = None
    expires: float


def signed_key(grant: EpisodeGrant, secret: bytes) -> str:
    """Returns the key of a permission."""
    claims = _encoded(grant.model_dump_json(exclude_none=True).encode())
    return f"{PREFIX}{claims}.{_encoded(_signature(claims, secret))}"


def granted(key: str, secret: bytes, now: float) -> EpisodeGrant:
    """Returns the permission of a key. `now`: seconds since the epoch. Raises BadEpisodeKey."""
    claims, dot, signature = key.removeprefix(PREFIX).partition(".")
    try:
        given = _decoded(signature)
    except (ValueError, binascii.Error) as error:
        raise BadEpisodeKey("this key of an episode is damaged") from error
    if not key.startswith(PREFIX) or not dot or not hmac.compare_digest(given, _signature(claims, secret)):
        raise BadEpisodeKey("this key of an episode was signed with another secret, or is damaged")
    try:
        grant = EpisodeGrant.model_validate_json(_decoded(claims))
    except (ValueError, ValidationError) as error:
        raise BadEpisodeKey("this key of an episode is of another version of Tentalis") from error
    if now > grant.expires + CLOCK_SLACK_S:
        raise BadEpisodeKey(f"this key has expired: the episode {grant.session_id} is over")
    return grant


def _signature(claims: str, secret: bytes) -> bytes:
    return hmac.new(secret, f"{PREFIX}{claims}".encode("utf-8", "surrogateescape"), hashlib.sha256).digest()


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode("ascii")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
