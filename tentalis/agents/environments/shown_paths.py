"""The names under which a policy and a task know folders, such as `/app`, and the folders that they are here. Pure."""

import re
from collections.abc import Mapping
from pathlib import Path


class ShownPaths:
    """Replaces names by folders in what is run, and folders by names in what is shown.

    A task of a container names folders that this machine does not have. Without a container, `/app` in a command is
    replaced by the episode's folder before the command runs, where it stands for itself: after a space, a quotation
    mark, `=` or the like, and not in `x/app` or `/apple`.

    >>> paths = ShownPaths({"/app": Path("/tmp/e1/app")})
    >>> paths.real("cat /app/x '/app' /apple ./app")
    "cat /tmp/e1/app/x '/tmp/e1/app' /apple ./app"
    >>> paths.shown("/tmp/e1/app/x: No such file")
    '/app/x: No such file'
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._real = dict(folders)
        self._shown = {str(folder): name for name, folder in folders.items()}
        self._names = _alternatives(self._real, r"(?<![\w.\-/~})])", r"(?![\w\-]|\.\w)")
        self._folders = _alternatives(self._shown, "", r"(?![\w\-])")

    def real(self, text: str) -> str:
        """Returns a text with folders in the place of their names."""
        return self._names.sub(lambda found: str(self._real[found[0]]), text)

    def shown(self, text: str) -> str:
        """Returns a text with names in the place of folders."""
        return self._folders.sub(lambda found: self._shown[found[0]], text)

    def path(self, name: str) -> Path:
        """Returns the folder or file here of an absolute path that begins with a name. Raises KeyError."""
        for known, folder in self._real.items():
            if name == known or name.startswith(f"{known}/"):
                return folder / name[len(known) :].lstrip("/")
        raise KeyError(name)


def _alternatives(texts: Mapping[str, object], before: str, after: str) -> re.Pattern[str]:
    if not texts:
        return re.compile(r"(?!)")
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, longest_first))}){after}")
