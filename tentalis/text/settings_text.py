"""Reads files of settings that people write."""

from pathlib import Path

MOST_CHARACTERS = 16 << 20
"""The size of the largest file that is read."""


def settings_text(path: Path) -> str:
    """Returns the text of a file of settings. Raises ValueError, which names the file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{path}: it is larger than {MOST_CHARACTERS >> 20} MiB, so these are no settings")
    return text
