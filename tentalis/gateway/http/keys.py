"""API keys and their scopes. Hashed at rest, in a JSON file that is reloaded when it changes.

A key is `tk-<id>-<secret>` with 256 random bits of secret, so a plain sha256 of it is safe to store: a slow hash would
only protect secrets that can be guessed.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.problems import problems
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import LimitOverrides, checked_overrides
from tentalis.inference import episode_key
from tentalis.inference.episode_key import BadEpisodeKey, EpisodeGrant
from tentalis.inference.episode_secret import BadEpisodeSecret

log = logging.getLogger(__name__)

_RELOAD_CHECK_S = 1.0


class Scope(StrEnum):
    """A permission of a key."""

    CHAT = "chat"
    FEEDBACK = "feedback"
    TASKS = "tasks"
    TRACES = "traces"
    EVENTS = "events"
    ADMIN = "admin"


class BadKeys(Exception):
    """The key file is invalid."""


class ApiKey(BaseModel):
    """A key as stored in the file. `user`: its owner; a key without an owner may act for any user (X-User-Id), and
    without X-User-Id reads only records that belong to no user, unless it has the scope admin. `limits`: in place of
    those of the gateway (KeyLimits)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    sha256: str
    scopes: tuple[Scope, ...]
    user: str | None = None
    label: str = ""
    created: int = 0
    revoked: int | None = None
    limits: LimitOverrides = {}


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ApiKey, ...] = ()


class Caller(BaseModel):
    """The caller of a request. `key_id` is "" if no key is required, and for a program that plays an episode. `limits`:
    the key's own limits. `episode`: the permission of an episode's key."""

    model_config = ConfigDict(frozen=True)

    key_id: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    user: str | None = None
    limits: dict[str, int | None] = {}
    episode: EpisodeGrant | None = None

    @property
    def sees_everybody(self) -> bool:
        """True if the caller may read the records of every user: no key is required, or the key has the scope admin."""
        if self.episode is not None:
            return False
        return self.user is None and (not self.key_id or Scope.ADMIN in self.scopes)

    def user_id(self, given: str | None) -> str:
        """The user of a call. `given`: X-User-Id. Raises APIError: 400, and 403 if the key belongs to another user."""
        if self.episode is not None:
            return self.user or ""
        given = given and _decode_utf8(given)
        if given and len(given) > 200:
            raise APIError(400, "X-User-Id has more than 200 characters")
        if self.user is not None and given and given != self.user:
            raise APIError(403, "this key is one user's and cannot act for another (X-User-Id)", "permission_error")
        return self.user or given or ""

    def namespace(self, user_id: str) -> str:
        """The namespace of the session names of this caller and user; "" if neither is known."""
        if user_id:
            return quote(user_id, safe="")
        return f"*{self.key_id}" if self.key_id else ""  # no quoted user id begins with *


def _decode_utf8(value: str) -> str:
    """Decodes a header's value, which was read as Latin-1, as UTF-8 if it is valid UTF-8."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def hash_api_key(key: str) -> str:
    """The sha256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load(path: Path) -> tuple[ApiKey, ...]:
    """Reads the keys of a file. Raises BadKeys, OSError."""
    try:
        return _KeyFile.model_validate_json(path.read_bytes()).keys
    except ValidationError as error:
        raise BadKeys(
            f"{path} is not a key file: {problems(error, 'the file')}. `tentalis keys create` creates one"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the key file against other processes, so that no change is lost between a read and a write. The lock is a
    separate file, because the key file itself is replaced."""
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _save_keys(path: Path, keys: Iterable[ApiKey]) -> None:
    """Replaces the file atomically, readable by its owner alone. Raises OSError."""
    # Earlier versions know no limits of single keys.
    entries = [key.model_dump(mode="json", exclude=None if key.limits else {"limits"}) for key in keys]
    text = json.dumps({"keys": entries}, indent=1) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def create(
    path: Path,
    scopes: Iterable[Scope],
    user: str | None = None,
    label: str = "",
    limits: Mapping[str, int | None] = MappingProxyType({}),
) -> str:
    """Adds a key and returns it; it cannot be shown again. `limits`: its own, in place of the gateway's.

    Raises BadKeys, OSError, ValueError for a limit that KeyLimits refuses.
    """
    own_limits = checked_overrides(limits)
    identifier = secrets.token_hex(4)
    key = f"tk-{identifier}-{secrets.token_urlsafe(32)}"
    entry = ApiKey(
        id=identifier,
        sha256=hash_api_key(key),
        scopes=tuple(scopes),
        user=user,
        label=label,
        created=int(time.time()),
        limits=own_limits,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        existing = load(path) if path.exists() else ()
        _save_keys(path, (*existing, entry))
    return key


def revoke(path: Path, identifier: str) -> bool:
    """Revokes a key; returns False if no active key has that id. Raises BadKeys, OSError."""
    with _locked(path):
        keys = load(path)
        if not any(key.id == identifier and key.revoked is None for key in keys):
            return False
        now = int(time.time())
        _save_keys(path, (key.model_copy(update={"revoked": now}) if key.id == identifier else key for key in keys))
    return True


def new_limits(key: ApiKey, limits: Mapping[str, int | None], removed: Collection[str]) -> dict[str, int | None]:
    """Returns a key's own limits after a change; see `set_limits`. Raises ValueError for one that KeyLimits refuses."""
    kept = {name: value for name, value in key.limits.items() if name not in removed}
    return checked_overrides({**kept, **limits})


def set_limits(
    path: Path, identifier: str, limits: Mapping[str, int | None], removed: Collection[str]
) -> dict[str, int | None] | None:
    """Changes a key's own limits and returns them all; None if no active key has that id. `limits`: new values;
    `removed`: names of limits that are those of the gateway again.

    Raises BadKeys, OSError, ValueError for a limit that KeyLimits refuses.
    """
    with _locked(path):
        keys = load(path)
        found = next((key for key in keys if key.id == identifier and key.revoked is None), None)
        if found is None:
            return None
        changed = new_limits(found, limits, removed)
        _save_keys(path, (key.model_copy(update={"limits": changed}) if key is found else key for key in keys))
    return changed


class Keys:
    """Checks keys. `path` None: no key is required, and every caller has every scope. `episode_secret` returns the
    secret of the keys of episodes; it raises BadEpisodeSecret or OSError. None: no episode is played here."""

    def __init__(self, path: Path | None, episode_secret: Callable[[], bytes] | None = None) -> None:
        self._path = path
        self._episode_secret = episode_secret
        self._by_hash: dict[str, ApiKey] = {}
        self._file_version: tuple[int, int] | None = None
        self._next_check = 0.0
        if path is not None:
            self._read(path)

    @property
    def listed(self) -> tuple[ApiKey, ...]:
        """The active keys, as last read."""
        return tuple(self._by_hash.values())

    def caller(self, key: str | None, scope: Scope | None) -> Caller:
        """Returns the caller of this key. `scope` None: any key will do. Raises APIError: 401 without a valid key, 403
        if it lacks the scope, 503 if the key file cannot be read."""
        if key is not None and key.startswith(episode_key.PREFIX):
            return self._episode_caller(key, scope)
        if self._path is None:
            return Caller()
        if time.monotonic() > self._next_check:
            try:
                self._read(self._path)
            except (OSError, BadKeys) as error:
                log.error("all calls are refused until the key file can be read again: %s", error)
                raise APIError(503, "the API key file cannot be read", "server_error", retry_after_s=5) from error
        if not key:
            raise APIError(401, "an API key is required: Authorization: Bearer tk-...", "authentication_error")
        found = self._by_hash.get(hash_api_key(key))
        if found is None:
            raise APIError(401, "this API key is unknown or was revoked", "authentication_error")
        if scope is not None and not {scope, Scope.ADMIN} & {*found.scopes}:
            raise APIError(403, f"this key lacks the scope {scope.value}", "permission_error")
        return Caller(key_id=found.id, scopes=frozenset(found.scopes), user=found.user, limits=found.limits)

    def _episode_caller(self, key: str, scope: Scope | None) -> Caller:
        """Returns the caller of an episode's key, which has the scope chat alone. Raises APIError (401, 403, 503)."""
        if self._episode_secret is None:
            raise APIError(401, "this gateway answers no programs that play episodes", "authentication_error")
        try:
            grant = episode_key.granted(key, self._episode_secret(), time.time())
        except BadEpisodeKey as error:
            raise APIError(401, str(error), "authentication_error") from error
        except (BadEpisodeSecret, OSError) as error:
            log.error("calls of episodes are refused: %s", error)
            raise APIError(503, f"keys of episodes cannot be checked: {error}", "server_error") from error
        if scope is not Scope.CHAT:
            raise APIError(403, "the key of an episode is for calls of models alone", "permission_error")
        return Caller(scopes=frozenset({Scope.CHAT}), user=grant.user_id, episode=grant)

    def _read(self, path: Path) -> None:
        stat = path.stat()
        file_version = (stat.st_mtime_ns, stat.st_ino)
        if file_version != self._file_version:
            self._by_hash = {key.sha256: key for key in load(path) if key.revoked is None}
            self._file_version = file_version
        self._next_check = time.monotonic() + _RELOAD_CHECK_S


def presented(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns the key of a request: Authorization: Bearer, or x-api-key as Anthropic's clients send it."""
    found = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            found = value.strip().decode("latin-1")
    return found
