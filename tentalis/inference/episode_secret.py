"""The secret with which a worker signs the keys of episodes, and the gateway checks them."""

import os
import secrets
from pathlib import Path

from tentalis.service import variables
from tentalis.service.security import BadSecurity, secret_of
from tentalis.service.settings import Settings

FILE_NAME = "episode-secret"
"""The file of the secret in TENTALIS_HOME, where no variable holds it."""
_LEAST_CHARACTERS = 16


class BadEpisodeSecret(ValueError):
    """The shared secret is missing or too short. The message says what to set."""


def shared_secret(settings: Settings, *, create: bool = False) -> bytes:
    """Returns the secret of TENTALIS_EPISODE_SECRET, or of the file that TENTALIS_EPISODE_SECRET_FILE names; else that
    of the file `episode-secret` in TENTALIS_HOME.

    Args:
        settings: those of the process.
        create: make the file in TENTALIS_HOME if neither variable is set.

    Raises:
        BadEpisodeSecret: there is none, both variables are set, or it has fewer than 16 characters.
        OSError: the file in TENTALIS_HOME cannot be read or made.
    """
    path = settings.home / FILE_NAME
    given, source = _set_secret()
    if given is None:
        if create:
            _create(path)
        if not path.exists():
            raise BadEpisodeSecret(
                f"there is no secret for the keys of episodes: set {variables.EPISODE_SECRET.name}[_FILE] to the same "
                f"secret for worker and gateway; on one machine a worker makes {path}"
            )
        given, source = path.read_text(encoding="utf-8").strip(), str(path)
    if len(given) < _LEAST_CHARACTERS:
        raise BadEpisodeSecret(f"{source} has fewer than {_LEAST_CHARACTERS} characters: take a random text")
    return given.encode()


def _set_secret() -> tuple[str | None, str]:
    """Returns the secret of the variables, None if neither is set, and the variable's name. Raises BadEpisodeSecret."""
    name = variables.EPISODE_SECRET.name
    try:
        found = secret_of(os.environ, name)
    except BadSecurity as error:
        raise BadEpisodeSecret(str(error)) from error
    if found is None:
        return None, name
    return found.get_secret_value(), name if os.environ.get(name) else variables.EPISODE_SECRET_FILE.name


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
