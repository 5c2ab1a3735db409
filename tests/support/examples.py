"""The commands of examples/README.md."""

import re
import shlex

from tests.support import ROOT

FOLDER = ROOT / "examples"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
NAMES: tuple[str, ...] = tuple(re.findall(r"^## (\S+)$", README, re.M))


def learn_arguments(name: str) -> list[str]:
    """Returns the arguments of `tentalis learn` in the section of an example."""
    section = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert section is not None, f"examples/README.md has no section {name}"
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section[1], re.M | re.S)
    program, noun, *words = shlex.split(block.replace("\\\n", " "))
    assert (program, noun) == ("tentalis", "learn")
    return words
