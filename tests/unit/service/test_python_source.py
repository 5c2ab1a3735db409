"""Parsing Python source while the same process parses another."""

import ast
import gc

import pytest

from tentalis.text.python_source import parsed

SOURCE = "\n".join(f"x{number} = [{number}, {{'a': ({number}, 'b')}}]" for number in range(200))


def test_a_parse_within_the_parse_does_no_harm() -> None:
    """The garbage collector calls what parses, as a traceback that it makes printed does."""
    within = []

    def collects(phase: str, _: object) -> None:
        if phase == "start" and not within:
            within.append((lambda: ast.parse("x = (1, 2)"))())

    gc.callbacks.append(collects)
    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        tree = parsed(SOURCE, "long.py")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collects)
    assert within and len(tree.body) == 200


@pytest.mark.parametrize(("message", "calls"), [("AST constructor recursion depth mismatch", 5), ("another", 1)])
def test_only_that_error_is_tried_again_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch, message: str, calls: int
) -> None:
    """Pythons that do not have the defect run this one alone."""
    asked = []

    def fails(*arguments: object) -> None:
        asked.append(arguments)
        raise SystemError(message)

    monkeypatch.setattr(ast, "parse", fails)
    with pytest.raises(SystemError, match=message):
        parsed("x = 1")
    assert len(asked) == calls
