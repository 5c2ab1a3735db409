"""Options of commands that play episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools", envvar="TOOLS_CONFIG", help="JSON or YAML file of the tools of toolcall.", show_default=False
    ),
]
Tasks = Annotated[
    Path | None,
    typer.Option("--tasks", help="Folder with the task folders of terminal.", show_default=False),
]
AllowUnsandboxed = Annotated[
    bool,
    typer.Option(
        "--allow-unsandboxed",
        help="Run the actions of a model without a wall, as this user, if this machine has no wall.",
    ),
]
