"""Loads reward functions by name, in their process: `PATH/rewards.py:score` or `package.module:score`.

A target may also be a rubric, an object with lists of functions and weights, as verifiers has.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tentalis.rewards.functions.signature import Signature, UnknownSignature, signature_of

_MAX_FOLLOWED = 200


class BadFunctionName(ValueError):
    """A target that is not a reward function; the message names the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function. `place`: file and line of its definition. `messages`: it reads completions as messages.
    `given`: arguments that its rubric gives to it."""

    name: str
    call: Callable[..., Any]
    signature: Signature
    place: str
    messages: bool
    weight: float = 1.0
    given: Mapping[str, Any] = field(default_factory=dict)


def split(target: str) -> tuple[str, str]:
    """Returns the file or module of a target, and the name in it. Raises BadFunctionName."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise BadFunctionName(f"{target!r} is not FILE.py:FUNCTION or MODULE:FUNCTION, such as rewards.py:score")
    return where, name


def is_file(where: str) -> bool:
    """Returns True if the first half of a target is the path of a file, False if it is a module."""
    return where.endswith(".py") or "/" in where


def module_of(where: str) -> ModuleType:
    """Returns the module of a target; a file is run once. Raises whatever its code raises."""
    if not is_file(where):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if path.stem in sys.stdlib_module_names:
        raise BadFunctionName(
            f"{where}: Python has a module {path.stem}: the file would take its place in all imports; rename the file"
        )
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if path.suffix != ".py":
        raise BadFunctionName(f"{where}: not a Python file: its name must end with .py")
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=_FromSource(path.stem, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class _FromSource(SourceFileLoader):
    """Compiles a file each time. Python's own cache takes a file of the same size, changed within the same second, for
    the earlier one: then a function would run whose source is not the one that its name has the digest of."""

    def get_code(self, fullname: str) -> CodeType:
        """Returns the code of the file as it is now."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def functions_of(module: ModuleType, where: str, name: str, form: str) -> Iterator[LoadedFunction]:
    """Yields the functions that a name of a module stands for. Raises BadFunctionName.

    Args:
        form: of completions: messages, text, or auto.
    """
    if not hasattr(module, name):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise BadFunctionName(f"{where} has no {name}; it has {', '.join(sorted(known)) or 'no functions'}")
    target = getattr(module, name)
    if inspect.isclass(target):
        raise BadFunctionName(f"{place_of(target, where)}: {name} is a class: name a function, or an object of it")
    rubric = _rubric_of(target)
    if rubric is not None:
        given = getattr(target, "class_objects", {})
        for function, weight in rubric:
            yield _loaded(function, getattr(function, "__name__", name), where, form, weight, given)
    elif callable(target):
        yield _loaded(target, name, where, form, 1.0, {})
    else:
        raise BadFunctionName(f"{where}: {name} is {type(target).__name__}, not a function")


def _loaded(
    function: Callable[..., Any], name: str, where: str, form: str, weight: float, given: Mapping[str, Any]
) -> LoadedFunction:
    place = place_of(function, where)
    try:
        signature = signature_of(function)
    except UnknownSignature as error:
        raise BadFunctionName(f"{place}: {name} cannot be called: {error}") from error
    known = {key: value for key, value in given.items() if signature.wants(key)}
    signature = Signature(
        signature.convention,
        signature.required - known.keys(),
        signature.optional - known.keys(),
        signature.everything,
        signature.coroutine,
    )
    messages = reads_messages(function) if form == "auto" else form == "messages"
    return LoadedFunction(name, function, signature, place, messages, weight, known)


def _rubric_of(target: Any) -> list[tuple[Callable[..., Any], float]] | None:
    for functions, weights in (("funcs", "weights"), ("reward_funcs", "reward_weights")):
        found, given = getattr(target, functions, None), getattr(target, weights, None)
        if isinstance(found, list) and isinstance(given, list) and found and len(found) == len(given):
            return [(function, float(weight)) for function, weight in zip(found, given, strict=True)]
    return None


def place_of(function: Any, where: str) -> str:
    """Returns `file:line` of a definition; the file alone if the line is unknown."""
    code = _code_of(function)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return where


def reads_messages(function: Callable[..., Any]) -> bool:
    """Returns True if a function, or one that it calls, treats a completion as messages: by its annotation, else
    because its code has the text "content"; a function of `completion` also by its attribute `.content`."""
    annotations = getattr(inspect.unwrap(function), "__annotations__", {})
    for name in ("completions", "completion"):
        annotation = annotations.get(name)
        if annotation is not None:
            text = annotation.__name__ if isinstance(annotation, type) and annotation is str else str(annotation)
            if "dict" in text.lower() or "message" in text.lower():
                return True
            if "str" in text:
                return False
    code = _code_of(function)
    if (
        code is not None
        and "completion" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        and "content" in _names(code)
    ):
        return True
    return any("content" in _constants(code) for code in _reached(function))


def _reached(function: Any) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions that it calls by a global name."""
    waiting, seen = [function], set[int]()
    while waiting and len(seen) < _MAX_FOLLOWED:
        each = waiting.pop()
        code = _code_of(each)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        yield code
        known = getattr(_plain(each), "__globals__", {})
        waiting += [known[name] for name in _names(code) if isinstance(known.get(name), FunctionType)]


def _names(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _constants(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {each for each in code.co_consts if isinstance(each, str)}.union(*map(_constants, inner))


def _plain(function: Any) -> Any:
    """Returns the function within decorators, partials, methods and objects with `__call__`."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and not inspect.isclass(function) and callable(function):
        function = type(function).__call__
    return getattr(function, "__func__", function)


def _code_of(function: Any) -> CodeType | None:
    code = getattr(_plain(function), "__code__", None)
    return code if isinstance(code, CodeType) else None
