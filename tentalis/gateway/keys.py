"""API keys: who may do what. Hashed at rest, in a JSON file that is read again when it changes.

A key is `tk-<id>-<secret>` with 256 random bits of secret, so that a plain sha256 of it can be kept: there is nothing
to guess that a slow hash would protect.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from tentalis.gateway.failure import Refused

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


class Scope(StrEnum):
    """What a key is good for."""

    CHAT = "chat"
    FEEDBACK = "feedback"
    TASKS = "tasks"
    TRACES = "traces"
    EVENTS = "events"
    ADMIN = "admin"


class BadKeys(Exception):
    """The file of keys cannot be used as it is."""


class Key(BaseModel):
    """A key as the file has it. `user`: whose it is; a key of nobody's may speak for any user (X-User-Id)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    sha256: str
    scopes: tuple[Scope, ...]
    user: str | None = None
    label: str = ""
    created: int = 0
    revoked: int | None = None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[Key, ...] = ()


class Caller(BaseModel):
    """Who makes a call. `key_id` "" where no keys are asked for."""

    model_config = ConfigDict(frozen=True)

    key_id: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    user: str | None = None

    def user_id(self, given: str | None) -> str:
        """The user that a call is for, `given` by X-User-Id. Raises Refused (403) where the key is somebody else's."""
        given = given and _as_sent(given)
        if given and len(given) > 200:
            raise Refused(400, "X-User-Id has more than 200 characters")
        if self.user is not None and given and given != self.user:
            raise Refused(403, "this key is one user's: it cannot speak for another (X-User-Id)", "permission_error")
        return self.user or given or ""

    def namespace(self, user_id: str) -> str:
        """What the names of sessions of this caller and user are apart by; "" where neither is known."""
        if user_id:
            return quote(user_id, safe="")
        return f"*{self.key_id}" if self.key_id else ""  # no quoted user id begins so


def _as_sent(value: str) -> str:
    """A header's value, which is read as Latin-1, as the UTF-8 that it was sent in, where it was."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def hashed(key: str) -> str:
    """sha256 (hex) of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises BadKeys, OSError."""
    try:
        return _File.model_validate_json(path.read_bytes()).keys
    except ValidationError as error:
        raise BadKeys(
            f"{path} is no file of keys: {error.errors()[0]['msg']}. `tentalis keys create` writes one"
        ) from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process changes the file at a time: who reads it, and writes what it read, takes nothing back that another
    has written between the two. The lock is a file beside it, because the file itself is replaced."""
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _save(path: Path, keys: Iterable[Key]) -> None:
    """Replaces the file in one step, readable by its owner alone. Raises OSError."""
    text = json.dumps(_File(keys=tuple(keys)).model_dump(mode="json"), indent=1) + "\n"
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


def create(path: Path, scopes: Iterable[Scope], user: str | None = None, label: str = "") -> str:
    """Adds a key and returns it: it is shown this once. Raises BadKeys, OSError."""
    identifier = secrets.token_hex(4)
    key = f"tk-{identifier}-{secrets.token_urlsafe(32)}"
    made = Key(
        id=identifier, sha256=hashed(key), scopes=tuple(scopes), user=user, label=label, created=int(time.time())
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        known = load(path) if path.exists() else ()
        _save(path, (*known, made))
    return key


def revoke(path: Path, identifier: str) -> bool:
    """Ends a key; False if there is none of that id that is in use. Raises BadKeys, OSError."""
    with _alone(path):
        keys = load(path)
        if not any(key.id == identifier and key.revoked is None for key in keys):
            return False
        now = int(time.time())
        _save(path, (key.model_copy(update={"revoked": now}) if key.id == identifier else key for key in keys))
    return True


class Keys:
    """Checks keys. `path` None: nobody is asked for one, and everybody may do everything."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._by_hash: dict[str, Key] = {}
        self._stamp: tuple[int, int] | None = None
        self._next_look = 0.0
        if path is not None:
            self._read(path)

    def caller(self, key: str | None, scope: Scope) -> Caller:
        """Who calls with this key. Raises Refused: 401 without a good key, 403 where its scopes do not reach."""
        if self._path is None:
            return Caller()
        if time.monotonic() > self._next_look:
            try:
                self._read(self._path)
            except (OSError, BadKeys) as error:
                log.error("no call is taken until the keys can be read again: %s", error)
                raise Refused(503, "the file of API keys cannot be read", "server_error", retry_after_s=5) from error
        if not key:
            raise Refused(401, "an API key is needed: Authorization: Bearer tk-...", "authentication_error")
        found = self._by_hash.get(hashed(key))
        if found is None:
            raise Refused(401, "this API key is not known here, or was revoked", "authentication_error")
        if scope not in found.scopes and Scope.ADMIN not in found.scopes:
            raise Refused(403, f"this key is not good for {scope.value}", "permission_error")
        return Caller(key_id=found.id, scopes=frozenset(found.scopes), user=found.user)

    def _read(self, path: Path) -> None:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != self._stamp:
            self._by_hash = {key.sha256: key for key in load(path) if key.revoked is None}
            self._stamp = stamp
        self._next_look = time.monotonic() + _LOOK_AGAIN_S


def presented(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key of a request: Authorization: Bearer, or x-api-key as Anthropic's clients send it."""
    found = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            found = value.strip().decode("latin-1")
    return found
