"""`tentalis train`: the trainer, and its configuration explained."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.common import USAGE, Bootstrap, CommandError, configure_logging, settings_of_role
from tentalis.cli.processes import MetricsPort


def train(
    config: Annotated[
        Path | None, typer.Option("--config", exists=True, dir_okay=False, help="YAML or TOML file (docs/config.md).")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes that train together.")] = 1,
    once: Annotated[
        bool, typer.Option("--once", help="One step, if a full batch is on the log; then end. Regardless of the hours.")
    ] = False,
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="End when no full batch is left on the log. Regardless of the hours."),
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="End after so many more steps. Regardless of the hours.")
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print every setting with its value and meaning, as YAML; train nothing."),
    ] = False,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Trains on rollouts and publishes adapters."""
    configure_logging("INFO")
    from trainer.config_file import load_config

    resolved = None if config is None else load_config(config, os.environ)
    if print_config:
        from trainer.config_print import commented

        sys.stdout.write(commented(resolved))
        return
    if resolved is None:
        raise CommandError("--config is missing. `tentalis train --print-config` prints one to begin with", USAGE)
    if once and steps is not None:
        raise CommandError("--once is one step: leave --steps out", USAGE)
    from trainer.goal import Goal
    from trainer.launch import main

    goal = Goal(1 if once else steps, caught_up=once or until_caught_up)
    raise typer.Exit(main(settings_of_role("trainer", bootstrap), resolved, ranks, port, goal))
