"""The files of docs/how-to/write-an-environment.md and docs/how-to/environment-file.md, as their readers make them."""

import re
from pathlib import Path

from tentalis.rewards import registry
from tests.support import ROOT

PAGES = ROOT / "docs" / "how-to"


def blocks(page: str, kind: str) -> list[str]:
    """The blocks of a kind in a page, such as `python`."""
    return re.findall(rf"```{kind}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def install_guess(folder: Path) -> None:
    """Writes the environment `guess` and the metadata of its package into a folder of Python's path."""
    code, project = (blocks("write-an-environment.md", kind)[0] for kind in ("python", "toml"))
    (folder / "guess.py").write_text(code, encoding="utf-8")
    metadata = folder / "guess-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guess\nVersion: 1.0\n")
    points = project.replace('[project.entry-points."tentalis.environments"]', "[tentalis.environments]")
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))


def write_environments(folder: Path) -> Path:
    """Writes the file of environments and its tool into a folder; returns the file."""
    (folder / "capital.py").write_text(blocks("environment-file.md", "python")[0], encoding="utf-8")
    file = folder / "environments.yaml"
    file.write_text(blocks("environment-file.md", "yaml")[0], encoding="utf-8")
    return file


def forget_environments() -> None:
    """Takes the environments of a file out of this process."""
    for name in registry.DECLARED:
        registry.ENVIRONMENTS.pop(name, None)
    registry.DECLARED.clear()
