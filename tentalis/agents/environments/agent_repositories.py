"""Disarms the git repositories that an agent left, so that a check may run git in them.

Git runs programs that a repository names: hooks, and settings such as `core.fsmonitor`, `diff.external` or filters. So
hooks are removed, and of the settings only those of a list are kept, which name no program.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_KEPT = {
    "core": frozenset(
        (
            *("repositoryformatversion", "filemode", "bare", "logallrefupdates", "ignorecase", "precomposeunicode"),
            *("symlinks", "autocrlf", "eol", "quotepath"),
        )
    ),
    "extensions": frozenset(("objectformat", "refstorage")),
    "user": frozenset(("name", "email")),
    "branch": frozenset(("remote", "merge", "rebase")),
    "remote": frozenset(("url", "fetch", "pushurl")),
}
"""Settings that are kept, by their section."""
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"([^"\\\n]*)")?\s*\]')
_NAME, _VALUE = re.compile(r"[A-Za-z][A-Za-z0-9-]*"), re.compile(r"[\w .@/:+*=,{}~^-]*")
_LARGEST = 1 << 20


def is_repository(names: frozenset[str]) -> bool:
    """Returns True if git may take a folder with these entries for a repository, or for what repositories share."""
    return "HEAD" in names or {"objects", "refs"} <= names


def disarm(repository: Path) -> None:
    """Removes hooks and settings that name programs. `repository`: the folder with HEAD. Call it when no process of the
    agent is left. Raises OSError."""
    hooks = repository / "hooks"
    if hooks.is_symlink() or not hooks.is_dir():
        hooks.unlink(missing_ok=True)
    else:
        for each in hooks.iterdir():
            if each.is_symlink() or not each.is_dir():
                each.unlink()  # what is in a folder below is no hook
    for name in ("config", "config.worktree"):
        config = repository / name
        if config.is_symlink():
            config.unlink()
        elif config.is_file():
            config.chmod(0o600)
            with config.open("rb") as file:
                text = file.read(_LARGEST).decode("utf-8", errors="replace")
            config.unlink()  # it may be a second name of another file
            config.write_text("".join(_kept_lines(text)), encoding="utf-8")


def _kept_lines(text: str) -> Iterator[str]:
    """Yields the lines of a new configuration. They are made anew from what is understood, so that nothing that git
    reads in another way comes through."""
    section = subsection = ""
    for line in text.splitlines():
        end = 0
        while (begun := _SECTION.match(line, end)) is not None:
            section, subsection = begun[1].lower(), begun[2] or ""
            end = begun.end()
        setting = _setting(line[end:])
        if setting is not None and setting[0] in _KEPT.get(section, ()):
            named = f' "{subsection}"' if subsection else ""
            yield f'[{section}{named}]\n\t{setting[0]} = "{setting[1]}"\n'


def _setting(text: str) -> tuple[str, str] | None:
    """Returns the name and value of a setting, None if it is not understood. No pattern has the spaces around both: it
    would be quadratic in spaces."""
    name, equals, value = (part.strip() for part in text.partition("="))
    value = value.removeprefix('"').removesuffix('"')
    if not equals or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        return None
    return name.lower(), value
