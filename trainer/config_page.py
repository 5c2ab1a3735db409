"""`python -m trainer.config_page docs/config.md`: the page about the configuration, from the code."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.aliases import ELSEWHERE, KEYS, VARIABLES, Alias
from trainer.config_print import commented

HEAD = """# The trainer's configuration

Written by `python -m trainer.config_page docs/config.md` from `trainer/config.py` and `trainer/aliases.py`.

`tentalis train --config FILE` reads one YAML file, or a TOML file if its name ends so. `tentalis train --print-config`
prints what follows below; with `--config FILE` too, with that file's values. A setting nobody knows is an error that
names the nearest known one; one that is there twice is an error too. `loss: NAME` stands for `loss: {kind: NAME}`. The
resolved text is part of the run's manifest; a resumed run under another configuration goes on under a new manifest.

## Names of other systems

A file may use these names at its top level, and the environment of `tentalis train` may hold the ancestors' variables:
a variable says what the file leaves open. Two names that contradict each other are an error, whichever they are; no one
wins silently.
"""


def page() -> str:
    """The page."""
    lines = [HEAD, "| key | stands for | note |", "|---|---|---|", *_rows(KEYS), ""]
    lines += ["| variable | stands for | note |", "|---|---|---|", *_rows(VARIABLES), ""]
    lines += ["These variables mean nothing here; where one is set, the trainer says so:", ""]
    lines += [f"- `{name}`: {instead}" for name, instead in sorted(ELSEWHERE.items())]
    return "\n".join([*lines, "", "## Every setting", "", "```yaml", commented() + "```", ""])


def _rows(aliases: Mapping[str, Alias]) -> Iterator[str]:
    for name, alias in aliases.items():
        yield f"| `{name}` | {', '.join(f'`{path}`' for path in alias.settings)} | {alias.note} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
