"""Functions that read text from outside take time in proportion to the text."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.hostile_text import BOUNDED, SCANNERS, modules_with_patterns

ROOT = Path(__file__).parents[2]


def slow(names: Iterable[str]) -> list[str]:
    """The jobs of the program that did not end within their CPU time."""
    command = [sys.executable, "-m", "tests.support.hostile_text", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.split()


def test_no_text_from_outside_makes_a_scanner_slow() -> None:
    assert slow(SCANNERS) == []


@pytest.mark.long
def test_no_text_from_outside_makes_a_pattern_slow() -> None:
    assert slow(BOUNDED) == []


def test_every_module_with_patterns_is_tried() -> None:
    assert modules_with_patterns(ROOT) == set(BOUNDED)
