"""The secret with which a worker signs the keys of episodes, and the gateway checks them."""

import os
import secrets
from pathlib import Path

from tentalis.service import variables
from tentalis.service.settings import Settings

FILE_NAME = "episode-secret"
"""The file of the secret in TENTALIS_HOME, where no variable holds it."""
_LEAST_CHARACTERS = 16


class BadEpisodeSecret(ValueError):
    """The shared secret is missing or too short. The message says what to set."""


def shared_secret(settings: Settings, *, create: bool = False) -> bytes:
    """Returns the secret of TENTALIS_EPISODE_SECRET, else that of the file `episode-secret` in TENTALIS_HOME.

    Args:
        settings: those of the process.
        create: make the file if there is neither.

    Raises:
        BadEpisodeSecret: there is none, or it has fewer than 16 characters.
        OSError: the file cannot be read or made.
    """
    path = settings.home / FILE_NAME
    given = variables.EPISODE_SECRET.read()
    source = variables.EPISODE_SECRET.name
    if given is None:
        if create:
            _create(path)
        if not path.exists():
            raise BadEpisodeSecret(
                f"there is no secret for the keys of episodes: set {variables.EPISODE_SECRET.name} to the same value "
                f"for worker and gateway; on one machine a worker makes {path}"
            )
        given, source = path.read_text(encoding="utf-8").strip(), str(path)
    if len(given) < _LEAST_CHARACTERS:
        raise BadEpisodeSecret(f"{source} has fewer than {_LEAST_CHARACTERS} characters: take a random text")
    return given.encode()


def _create(path: Path) -> None:
    """Makes the file with a new secret, for this user alone, unless it exists. Whole at once: others may read it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(made, path)
        except FileExistsError:
            return  # another worker was faster
    finally:
        made.unlink()
