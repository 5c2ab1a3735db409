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
_SETTING = re.compile(r'\s*([A-Za-z][A-Za-z0-9-]*)\s*=\s*"?([\w .@/:+*=,{}~^-]*?)"?\s*\Z')
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
        rest = line
        while (begun := _SECTION.match(rest)) is not None:
            section, subsection = begun[1].lower(), begun[2] or ""
            rest = rest[begun.end() :]
        found = _SETTING.match(rest)
        if found is not None and found[1].lower() in _KEPT.get(section, ()):
            named = f' "{subsection}"' if subsection else ""
            yield f'[{section}{named}]\n\t{found[1].lower()} = "{found[2]}"\n'
