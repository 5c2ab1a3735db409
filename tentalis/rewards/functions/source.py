"""The source of a reward function: its file and the modules that it imports from the same folders, and their digest."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.ids import sha256_hex
from tentalis.text.python_source import parsed


class BadSource(ValueError):
    """A file of reward functions that cannot be read or parsed; the message names file and line."""


def source_files(path: Path, folders: Sequence[Path] = ()) -> list[Path]:
    """Returns the file and every module that it imports, directly or not, from its folder or `folders`.

    Imports within functions count too. Modules of installed packages and those that are imported by a computed name are
    not found. Raises BadSource.
    """
    roots = [path.parent.resolve(), *(folder.resolve() for folder in folders)]
    found: dict[Path, None] = {}
    waiting = [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        for module, base in _imports(file, _parse(file)):
            waiting += _located(module, [base] if base else roots)
    return sorted(found)


def digest(path: Path, folders: Sequence[Path] = ()) -> str:
    """Returns the sha256 (hex) of the source: file names relative to their folders, and bytes. Raises BadSource."""
    roots = [path.parent.resolve(), *(folder.resolve() for folder in folders)]
    parts = []
    for file in source_files(path, folders):
        root = next((root for root in roots if file.is_relative_to(root)), file.parent)
        parts.append(f"{file.relative_to(root).as_posix()} {sha256_hex(_bytes(file))}")
    return sha256_hex("\n".join(sorted(parts)).encode())


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadSource(f"{file}: {error.strerror or error}") from error


def _parse(file: Path) -> ast.Module:
    try:
        return parsed(_bytes(file), str(file))
    except SyntaxError as error:
        raise BadSource(f"{file}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # a NUL byte, an unknown encoding
        raise BadSource(f"{file}: not Python: {error}") from error


def _imports(file: Path, tree: ast.Module) -> Iterator[tuple[str, Path | None]]:
    """Yields dotted module names, each with the folder that a relative one starts from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else None
            module = node.module or ""
            if module:
                yield module, base
            for alias in node.names:
                yield f"{module}.{alias.name}".lstrip("."), base


def _located(module: str, roots: Sequence[Path]) -> list[Path]:
    """Returns the files of a module and of the packages around it, if it lies in one of the folders."""
    for root in roots:
        place, files = root, list[Path]()
        for name in module.split("."):
            if (place / f"{name}.py").is_file():
                files.append((place / f"{name}.py").resolve())
                break
            place = place / name
            if (place / "__init__.py").is_file():
                files.append((place / "__init__.py").resolve())
            elif not place.is_dir():
                break
        if files:
            return files
    return []
