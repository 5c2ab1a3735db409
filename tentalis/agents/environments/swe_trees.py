"""Compares folders of files and carries changes from one to another. Nothing is run, and no link is followed.

An agent wrote one of the folders, so what is not a plain file, or a link that stays within, is passed over.
"""

import filecmp
import os
import posixpath
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_LONGEST_FOLDER = 3000
"""Bytes of the path of a folder that is looked into."""
_MOST_ENTRIES = 300_000
_RUNNABLE = 0o100


class ChangesTooLarge(Exception):
    """An agent changed more than its limits allow."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A file (`link` None) or a link. `runs`: the file is a program."""

    link: str | None
    runs: bool
    size: int


@dataclass(frozen=True, slots=True)
class TreeChanges:
    """The paths at which a folder differs from another: `written` with what is there now, and `removed`."""

    written: Mapping[str, TreeEntry]
    removed: frozenset[str]

    @property
    def paths(self) -> frozenset[str]:
        """All changed paths."""
        return self.removed | frozenset(self.written)

    def without(self, paths: frozenset[str]) -> "TreeChanges":
        """Returns the changes at other paths."""
        written = {path: entry for path, entry in self.written.items() if path not in paths}
        return TreeChanges(written, self.removed - paths)


def changes_between(old: Path, new: Path) -> TreeChanges:
    """Returns the changes from one folder to another. Raises OSError or ChangesTooLarge."""
    before, after = dict(_entries(old)), dict(_entries(new))
    written = {path: entry for path, entry in after.items() if not _same(old, new, path, before.get(path), entry)}
    return TreeChanges(written, frozenset(before) - frozenset(after))


def check_size(changes: TreeChanges, files: int, size: int) -> None:
    """Raises ChangesTooLarge if changes have more files or bytes."""
    if len(changes.paths) > files:
        raise ChangesTooLarge(f"{len(changes.paths)} files changed, and {files} are allowed")
    changed = sum(entry.size for entry in changes.written.values())
    if changed > size:
        raise ChangesTooLarge(f"{changed} bytes in changed files, and {size} are allowed")


def carry(changes: TreeChanges, source: Path, target: Path) -> None:
    """Makes changes in `target`, with the content of `source`. Raises OSError."""
    for path in sorted(changes.removed | frozenset(changes.written)):
        _remove(target / path)
    # Links last, so that no file is written through one.
    for path, entry in sorted(changes.written.items(), key=lambda item: (item[1].link is not None, item[0])):
        place = target / path
        _make_folder(target, path)
        if entry.link is not None:
            place.symlink_to(entry.link)
            continue
        descriptor = os.open(source / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as read, place.open("xb") as write:
            shutil.copyfileobj(read, write)
        place.chmod(0o755 if entry.runs else 0o644)


def _remove(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.is_dir():
        shutil.rmtree(place)


def _make_folder(target: Path, path: str) -> None:
    """Makes the folder of a path; a file or link that stands in its way is removed."""
    place = target
    for part in path.split("/")[:-1]:
        place /= part
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)
            place.mkdir()


def _same(old: Path, new: Path, path: str, before: TreeEntry | None, after: TreeEntry) -> bool:
    if before is None or before != after:
        return False
    return after.link is not None or filecmp.cmp(old / path, new / path, shallow=False)


def _entries(folder: Path) -> Iterator[tuple[str, TreeEntry]]:
    """Yields the files and links in a folder by their path; without repositories of git and compiled Python. Raises
    ChangesTooLarge."""
    folders, n_seen = [""], 0
    while folders:
        inside = folders.pop()
        if len(os.fsencode(folder / inside)) > _LONGEST_FOLDER:
            continue
        with os.scandir(folder / inside) as found:
            for entry in found:
                n_seen += 1
                if n_seen > _MOST_ENTRIES:
                    raise ChangesTooLarge(f"over {_MOST_ENTRIES} files")
                path = f"{inside}/{entry.name}" if inside else entry.name
                if entry.name in (".git", "__pycache__") or entry.name.endswith(".pyc") or not _is_text(path):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(path)
                elif stat.S_ISREG(status.st_mode):
                    yield path, TreeEntry(None, bool(status.st_mode & _RUNNABLE), status.st_size)
                elif stat.S_ISLNK(status.st_mode) and _stays(path, link := str(Path(entry.path).readlink())):
                    yield path, TreeEntry(link, False, len(link))


def _is_text(path: str) -> bool:
    return path.isprintable()  # not so for what is not UTF-8


def _stays(path: str, link: str) -> bool:
    """Returns True if a link leads to a place in its tree, as far as its text tells."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return _is_text(link) and not link.startswith("/") and target != ".." and not target.startswith("../")
