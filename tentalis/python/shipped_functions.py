"""Names functions of Python so that another process can load them: by file, by module, or by their source in a file.

A function of a module is loaded from there. A function of a script or a notebook cell is written into a file with all
that it uses: functions and classes beside it, imports, constants. Importing the script would run the training again.
Modules beside the script are found in its folder.
"""

import __future__

import ast
import contextlib
import dis
import importlib.util
import inspect
import linecache
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from schemas.ids import sha256_hex
from tentalis.learning.errors import LearnError
from tentalis.text.python_source import parsed

MAIN = frozenset({"__main__", "__mp_main__"})
MOST_CONSTANT = 100_000
"""Characters of the largest constant that is written with a function."""
OWN = frozenset({"schemas", "streams", "tentalis", "trainer"})
"""Packages that the process of the functions finds in any case."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class FunctionPlace:
    """The place of a function: `FILE.py:NAME` or `MODULE:NAME`. `folders`: those of modules that it needs and that are
    not installed."""

    target: str
    folders: tuple[Path, ...] = ()


def place_of(function: Callable[..., Any], folder: Path) -> FunctionPlace:
    """Returns the place of a function; writes its source into `folder` if it has no file of its own.

    Raises LearnError.
    """
    if not isinstance(function, FunctionType):
        raise LearnError(f"{function!r} is {type(function).__name__}, not a function: write a `def` that calls it")
    if function.__name__ == "<lambda>":
        raise LearnError("a lambda has no name by which another process could load it: write a `def`")
    module = sys.modules.get(function.__module__)
    named = module is not None and getattr(module, function.__name__, None) is function
    if function.__module__ in MAIN or not named or not getattr(module, "__file__", None):
        return _written(function, folder)
    assert module is not None
    top, _, within = function.__module__.partition(".")
    if not within and not getattr(module, "__path__", None):
        return FunctionPlace(f"{Path(str(module.__file__)).resolve()}:{function.__name__}")
    return FunctionPlace(f"{function.__module__}:{function.__name__}", _folders_of([top]))


def _folders_of(modules: Iterable[str]) -> tuple[Path, ...]:
    """Returns the folders of top-level modules that are not installed, in the order of the module path."""
    found = {_folder_of(name) for name in modules if name not in OWN}
    path = [Path(entry).resolve() for entry in sys.path]
    folders = [folder for folder in found if folder is not None and not _is_installed(folder)]
    return tuple(sorted(folders, key=lambda each: (path.index(each) if each in path else len(path), each)))


def _folder_of(module: str) -> Path | None:
    """Returns the folder in which a module is found, None if it has no file or is not found."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # made by a program, without a place
        return None
    if spec is None:
        return None
    inside = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    return None if inside is None else Path(inside).parent.resolve()


def _is_installed(folder: Path) -> bool:
    paths = sysconfig.get_paths()
    libraries = (Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not _INSTALLED.isdisjoint(folder.parts) or any(folder.is_relative_to(each) for each in libraries)


def _written(function: FunctionType, folder: Path) -> FunctionPlace:
    source = source_with_uses(function)
    folder.mkdir(parents=True, exist_ok=True)
    # Named by its content: the same function continues a run, a changed one is another function.
    path = folder / f"{function.__name__}_{sha256_hex(source.encode())[:_DIGEST_CHARS]}.py"
    path.write_text(source, encoding="utf-8")
    return FunctionPlace(f"{path.resolve()}:{function.__name__}", _folders_of(_imported(source)))


def _imported(source: str) -> list[str]:
    """Returns the modules and packages that a source imports, without the names within packages."""
    names = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.append(node.module)
    return [name.partition(".")[0] for name in names]


def source_with_uses(function: FunctionType) -> str:
    """Returns a module that defines the function and all that it uses. Raises LearnError, which names what cannot be
    written."""
    parts = _Parts(function)
    parts.define(function.__name__, function)
    heading = f'"""Written by tentalis.learn: {function.__name__} and what it uses, of a script or a notebook."""\n'
    future = ["from __future__ import annotations\n"] if parts.future else []
    return "\n".join([heading, *future, *parts.imports, "", *parts.definitions])


class _Parts:
    """The lines of a module that are made of a function: imports, and definitions in the order of their use."""

    def __init__(self, function: FunctionType) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self.future = bool(function.__code__.co_flags & __future__.annotations.compiler_flag)
        self._root = function.__name__
        self._done: dict[str, Any] = {}

    def define(self, name: str, value: Any) -> None:
        """Adds the lines that give a name its value, those of the names that it uses first."""
        if name in self._done:
            if self._done[name] is not value:
                raise LearnError(f"{self._root} uses two things with the name {name}: rename one of them")
            return
        self._done[name] = value
        if isinstance(value, ModuleType):
            if value.__name__ in MAIN:
                raise self._refused(name, "the script itself")
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, FunctionType | type) and (value.__module__ in MAIN or "<locals>" in value.__qualname__):
            self._define_source(name, value)
        elif (line := _import_line(name, value)) is not None:
            self.imports.append(line)
        elif isinstance(value, FunctionType | type):
            self._define_source(name, value)
        elif isinstance(value, re.Pattern):
            self._add_import("import re")
            self.definitions.append(f"{name} = re.compile({value.pattern!r}, {value.flags})\n")
        else:
            self._define_constant(name, value)

    def _define_source(self, name: str, value: FunctionType | type) -> None:
        source = self._source(name, value)
        own = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        if not isinstance(own, FunctionType | type):
            raise self._refused(name, f"a {type(own).__name__} behind a decorator")
        known = _known_to(own)
        for used in _names_used(source, value.__name__, self.future):
            if used in known and used != value.__name__:
                self.define(used, known[used])
        self.definitions.append(source + ("" if name == value.__name__ else f"\n{name} = {value.__name__}\n"))

    def _source(self, name: str, value: FunctionType | type) -> str:
        try:
            source = textwrap.dedent(_class_source(value) if isinstance(value, type) else inspect.getsource(value))
            parsed(source)
        except (OSError, TypeError, SyntaxError) as error:
            raise LearnError(
                f"the source of {name} cannot be read ({error}), so it cannot run in the process of the reward "
                "functions: put it into a file, and import it from there"
            ) from error
        if value.__name__ == "<lambda>":
            raise self._refused(name, "a lambda")
        return source

    def _define_constant(self, name: str, value: Any) -> None:
        text = repr(value)
        try:
            same = len(text) <= MOST_CONSTANT and ast.literal_eval(text) == value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            same = False
        if not same:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise self._refused(name, f"a {kind}" + (" that is too large" if len(text) > MOST_CONSTANT else ""))
        self.definitions.append(f"{name} = {text}\n")

    def _add_import(self, line: str) -> None:
        if line not in self.imports:
            self.imports.append(line)

    def _refused(self, name: str, kind: str) -> LearnError:
        return LearnError(
            f"{self._root} uses {name}, which is {kind}: it runs in a process that loads only functions, classes, "
            f"modules and constants. Make {name} within the function, or put the function into a file"
        )


def _class_source(value: type) -> str:
    """Returns the source of a class. Of a class of a notebook, which has no file, its methods know the cell.

    Raises OSError.
    """
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        codes = [each.__code__ for each in vars(value).values() if isinstance(each, FunctionType)]
        for code in codes:
            text = "".join(linecache.getlines(code.co_filename))
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.ClassDef) and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
        raise


def _import_line(name: str, value: Any) -> str | None:
    """Returns the line that imports a function or class of a module, None if it cannot be found there."""
    where = getattr(value, "__module__", None)
    own = getattr(value, "__qualname__", None)
    if not isinstance(where, str) or not isinstance(own, str) or "." in own:
        return None
    found = getattr(sys.modules.get(where), own, None)
    return f"from {where} import {own} as {name}" if found is value else None


def _known_to(value: FunctionType | type) -> dict[str, Any]:
    """Returns the names that a definition can use, with their values."""
    if isinstance(value, type):
        return dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    known = dict(value.__globals__)
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty: the name has no value yet
            known[name] = cell.cell_contents
    return known


def _names_used(source: str, own: str, future: bool) -> list[str]:
    """Returns the names that a definition takes from the module around it, in the order of their first use."""
    flags = __future__.annotations.compiler_flag if future else 0
    found: dict[str, None] = {}
    for code in _codes(compile(source, f"<{own}>", "exec", flags=flags, dont_inherit=True)):
        steps = list(dis.get_instructions(code))
        stored = {step.argval for step in steps if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
        for step in steps:
            if step.opname == "LOAD_GLOBAL" or (step.opname == "LOAD_NAME" and step.argval not in stored):
                found.setdefault(str(step.argval))
    return list(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
