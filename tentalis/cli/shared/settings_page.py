"""`python -m tentalis.cli.shared.settings_page docs/reference/settings.md`: generates the page of all variables."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tentalis.service.outside_variables import COMPOSE, TESTS
from tentalis.service.variable import Variable
from tentalis.service.variables import VARIABLES

HEAD = """# Settings

Written by `python -m tentalis.cli.shared.settings_page docs/reference/settings.md` from
`tentalis/service/variables.py` and `tentalis/service/outside_variables.py`.

`tentalis config list` shows the variables with their values and where each came from; `tentalis config check` checks
them. An option of a command takes precedence over its variable, and a variable over the
[settings file](../operations/profiles.md). An empty variable counts as unset. Every command that
starts processes (`up`, `demo`, `learn`, `serve`, `train`, `worker`, `manager`) checks all variables first: a value
that is not allowed ends it with exit code 2, before anything starts.

Settings of the trainer are in its [configuration file](config.md). Traces also follow the `OTEL_*` variables of
[OpenTelemetry](../operations/observability.md).
"""
OUTSIDE = """## Read by Docker Compose

`docker-compose.yml` reads these, from the environment or from `.env` beside it; no process does.
"""
TESTED = """## Read by the tests
"""
INTERNAL = """## Set by processes

A process sets these for its children; do not set them.
"""


def markdown() -> str:
    """Returns the page."""
    given = [each for each in VARIABLES if not each.internal]
    internal = [each for each in VARIABLES if each.internal]
    parts = [(HEAD, given), (INTERNAL, internal), (OUTSIDE, COMPOSE), (TESTED, TESTS)]
    return "\n\n".join("\n".join([head, *_table(variables)]) for head, variables in parts) + "\n"


def _table(variables: Sequence[Variable[Any]]) -> list[str]:
    return ["| variable | value | default | meaning | read by |", "|---|---|---|---|---|", *map(_row, variables)]


def _row(variable: Variable[Any]) -> str:
    default = variable.default_text or (f"`{variable.default_shown}`" if variable.default_shown else "")
    allowed = variable.kind.allowed + ("; a secret" if variable.secret else "")
    return f"| `{variable.name}` | {allowed} | {default} | {variable.meaning} | {variable.used_by} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
