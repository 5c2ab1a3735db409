"""Python source as a syntax tree."""

import ast

_TRIES = 5


def parsed(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """Returns the tree of `ast.parse`, and raises what it raises.

    Python 3.11 before its release 3.11.8 counts the depth of all parses of a process in one place, so one that begins
    during another (in another thread, or in what the garbage collector calls) makes the other one fail with SystemError
    (python/cpython#106905). A parse that fails in this way is tried again.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source, filename)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return ast.parse(source, filename)
