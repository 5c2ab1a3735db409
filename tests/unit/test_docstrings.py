"""Docstrings name errors and methods that exist."""

import ast
import builtins
import re
from collections import defaultdict

import pytest

from tests.support import ROOT

PACKAGES = ("schemas", "streams", "tentalis", "trainer")
RAISES = re.compile(r"\bRaises:?\s(?:[^.]|\.(?=\w))*")  # to the end of the sentence or of the block
ERROR = re.compile(r"(?:Raises:?\s+|[,;)]\s+|\n\s+|\band |\bor )([A-Z][a-z]+\w*)\b(?! errors)")
METHOD = re.compile(r"(?<![\w.])([A-Z][a-z]\w+)\.([a-z]\w+)")


class Source:
    """The product's source: its docstrings by place, the members of its classes, and every name that it knows."""

    def __init__(self) -> None:
        self.docstrings: list[tuple[str, str]] = []
        self.members: dict[str, set[str]] = defaultdict(set)
        self.known = set(dir(builtins))
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                self._add(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8")))
        self.known |= set(self.members)

    def _add(self, path: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                self.docstrings += [(f"{path}:{getattr(node, 'lineno', 1)}", text)] if text else []
            if isinstance(node, ast.ClassDef):
                for each in ast.walk(node):
                    name = getattr(each, "name", None) or getattr(each, "id", None) or getattr(each, "attr", None)
                    if isinstance(name, str):
                        self.members[node.name].add(name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.known.update((each.asname or each.name).split(".")[-1] for each in node.names)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def test_every_error_that_a_docstring_says_is_raised_exists(source: Source) -> None:
    named = [
        (place, error)
        for place, text in source.docstrings
        for part in RAISES.findall(text)
        for error in ERROR.findall(part)
    ]
    assert len(named) > 500
    assert [each for each in named if each[1] not in source.known] == []


def test_every_method_that_a_docstring_names_exists(source: Source) -> None:
    named = [(place, *each) for place, text in source.docstrings for each in METHOD.findall(text)]
    assert len(named) > 25
    assert [each for each in named if each[1] not in source.known] == []
    assert [each for each in named if each[1] in source.members and each[2] not in source.members[each[1]]] == []
