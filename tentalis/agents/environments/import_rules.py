"""Rules of imports for Python code of a policy: which modules it may name in imports. Pure.

A rule, not a wall: it reads the text of the code, and code that wants to get around it can (`exec`, `sys.modules`). It
keeps a policy to the modules that a task means. What protects the machine is the wall.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tentalis.text.python_source import parsed

_IMPORTERS = ("__import__", "import_module")


@dataclass(frozen=True, slots=True)
class ImportRules:
    """`allow`: the modules that may be imported, None for all. `deny`: modules that may not be, whatever `allow` says.
    A module stands for its submodules too."""

    allow: Sequence[str] | None = None
    deny: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.allow is not None or bool(self.deny)

    @property
    def description(self) -> str:
        """A sentence for the prompt; empty without rules."""
        parts = []
        if self.allow is not None:
            parts.append(f"only {', '.join(self.allow)}" if self.allow else "no module")
        if self.deny:
            parts.append(f"not {', '.join(self.deny)}")
        return f"It may import {', and '.join(parts)}." if parts else ""

    def forbids(self, module: str) -> bool:
        """Returns True if a module may not be imported.

        >>> [ImportRules(("math", "os"), ("os.path",)).forbids(name) for name in ("math", "os", "os.path", "mathx")]
        [False, False, True, True]
        """
        allowed = self.allow is None or _covers(self.allow, module)
        return not allowed or _covers(self.deny, module)


def import_problem(code: str, rules: ImportRules) -> str | None:
    """Returns the reason why code breaks the rules, or None. Code that is not Python breaks none: it cannot run.

    >>> import_problem("from os import path", ImportRules(deny=("os.path",)))
    'the import of os.path is not allowed. It may import not os.path.'
    """
    if not rules:
        return None
    try:
        tree = parsed(code)
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):
        return "the code is nested too deeply to check its imports"
    for module in _imported(tree):
        if module is None:
            return f"an import must name its module as plain text. {rules.description}"
        if rules.forbids(module):
            return f"the import of {module} is not allowed. {rules.description}"
    return None


def _covers(rules: Sequence[str], module: str) -> bool:
    return any(module == rule or module.startswith(f"{rule}.") for rule in rules)


def _imported(tree: ast.AST) -> Iterator[str | None]:
    """Yields the modules that code imports, None for one that it computes."""
    called = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                # `from a import b` imports the module a.b if there is one; `a` alone may be allowed.
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Name() | ast.Attribute() as function) if _name(function) in _IMPORTERS:
                called.add(function)
                match node.args[:1]:
                    case [ast.Constant(value=str(module))]:
                        yield module
                    case _:
                        yield None
            case ast.Name() | ast.Attribute() if _name(node) in _IMPORTERS and node not in called:
                yield None


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
