"""Functions that read text from outside take time in proportion to the text."""

import subprocess
import sys
from pathlib import Path

from tests.support.hostile_text import BOUNDED, modules_with_patterns

ROOT = Path(__file__).parents[2]


def test_no_text_from_outside_makes_a_scanner_slow() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile_text"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [], found.stderr


def test_every_module_with_patterns_is_tried() -> None:
    assert modules_with_patterns(ROOT) == set(BOUNDED)
