"""`python -m trainer.config.page docs/reference/config.md`: generates the configuration's page from the code."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.config.aliases import (
    IGNORED_SECTION_KEYS,
    IGNORED_VARIABLES,
    KEY_ALIASES,
    SECTION_ALIASES,
    VARIABLE_ALIASES,
    SettingAlias,
)
from trainer.config.commented import commented_yaml
from trainer.config.conversation import ANCHOR
from trainer.config.trainer_config import as_yaml

PAGE_HEAD = """# The trainer's configuration

Written by `python -m trainer.config.page docs/reference/config.md` from `trainer_config.py` and `aliases.py` in
`trainer/config/`.

`tentalis train --config FILE` reads one YAML file, or a TOML file if its name ends in `.toml`. `tentalis train
--print-config` prints the settings below with their defaults; with `--config FILE`, with that file's values. An unknown
setting is an error that names the nearest known one; a setting that is given twice is an error too. `loss: NAME` stands
for `loss: {kind: NAME}`. The resolved text is part of the run's manifest; a run that is resumed with another
configuration continues with a new manifest.

## Names of other systems

A file may use these names at its top level, or the sections of an OpenClaw-RL file. The environment of `tentalis train`
may hold the variables of earlier systems; a variable fills in a setting that the file leaves open. A variable of a
feature counts only if the feature's own variable turns it on. Two names that contradict each other are an error: there
is no precedence.
"""

CONVERSATIONS = f"""`tentalis up` trains on conversations. Where the run that it begins or continues does not set
`loss.kl`, it holds the policy near the base model, at the price of one forward pass of the base model for each step. So
do the chart and Compose. A file given with `--config` is taken as it is:

```yaml
{as_yaml({"loss": {"kl": ANCHOR.model_dump(mode="json")}}).strip()}
```"""


def render_page() -> str:
    """Returns the page."""
    lines = [PAGE_HEAD, "| key | stands for | note |", "|---|---|---|", *_table_rows(KEY_ALIASES), ""]
    lines += ["| in a section | stands for | note |", "|---|---|---|"]
    lines += [row for section, keys in SECTION_ALIASES.items() for row in _table_rows(keys, section)]
    lines += ["", "These keys in a section have no effect; the trainer logs a warning if one is set:", ""]
    for section, others in IGNORED_SECTION_KEYS.items():
        lines += [f"- `{section}.{name}`: {instead}" for name, instead in others.items()]
    lines += ["", "| variable | stands for | note |", "|---|---|---|", *_table_rows(VARIABLE_ALIASES), ""]
    lines += ["These variables have no effect; the trainer logs a warning if one is set:", ""]
    lines += [f"- `{name}`: {instead}" for name, instead in sorted(IGNORED_VARIABLES.items())]
    lines += ["", "## Conversations", "", *CONVERSATIONS.splitlines(), ""]
    return "\n".join([*lines, "## Every setting", "", "```yaml", commented_yaml() + "```", ""])


def _table_rows(aliases: Mapping[str, SettingAlias], section: str = "") -> Iterator[str]:
    """Yields a table row for each name; in a section, the names that may stand at the top level too share one row."""
    top = [name for name in aliases if section and aliases[name] is KEY_ALIASES.get(name)]
    if top:
        names = "any of the names above" if len(top) == len(KEY_ALIASES) else ", ".join(f"`{name}`" for name in top)
        yield f"| `{section}` | {names} | as at the top level |"
    for name, alias in aliases.items():
        if name not in top:
            settings = ", ".join(f"`{path}`" for path in alias.settings)
            yield f"| `{section}{section and '.'}{name}` | {settings} | {alias.note} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page(), encoding="utf-8")
