"""Compares two LaTeX answers with the library math-verify. Runs in the process of reward functions, within its limits.

Sympy tests some equalities at random points, so each comparison seeds it: the same answers are always equal or never.
"""

from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.random import seed

_FORMS = (LatexExtractionConfig(),)


def equal(completions: list[str], reference: list[str]) -> list[float]:
    """Returns [1.0] if the answer in `completions` equals the reference, else [0.0]; also if either cannot be read.

    The library's own time limits need signals and are off: the process has a limit.
    """
    seed(0)
    answer, expected = (_read(text) for text in (completions[0], reference[0]))
    return [float(bool(answer and expected) and verify(expected, answer, timeout_seconds=None))]


def _read(latex: str) -> list[object]:
    found: list[object] = parse(
        f"${latex}$", extraction_config=_FORMS, fallback_mode="no_fallback", parsing_timeout=None
    )
    return found
