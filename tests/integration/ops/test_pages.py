"""Pages of docs/operations whose commands need neither a broker nor a cluster, executed as they are shown."""

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.transcript import PageShell, commands_of

PAGES = [
    ROOT / "docs" / "operations" / "helm.md",
    ROOT / "docs" / "operations" / "install.md",
    ROOT / "docs" / "operations" / "scale.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    with PageShell(tmp_path, {"COLUMNS": "200"}) as operator:
        (operator.folder / "helm").symlink_to(ROOT / "helm")
        operator.follow(commands_of(page))
