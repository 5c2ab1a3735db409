"""`tentalis train`: runs the trainer, or prints its configuration with comments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.stdout import data


def train(
    config: Annotated[
        Path | None,
        typer.Option("--config", exists=True, dir_okay=False, help="YAML or TOML file (docs/reference/config.md)."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of training processes, on each node.")] = 1,
    nodes: Annotated[int, variable_option(variables.TRAINER_NODES, "--nodes")] = variables.TRAINER_NODES.default,
    node: Annotated[int, variable_option(variables.TRAINER_NODE, "--node")] = variables.TRAINER_NODE.default,
    rendezvous: Annotated[str | None, variable_option(variables.TRAINER_RENDEZVOUS, "--rendezvous")] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Train one step if a full batch is on the log, then end. Ignores training hours."),
    ] = False,
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="End when no full batch is left on the log. Ignores training hours."),
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="End after this many more steps. Ignores training hours.")
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print every setting with its value and meaning, as YAML; train nothing."),
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            envvar=variables.ACCEPT_LOSS.name,
            help="Continue after the rollouts topic was deleted, created again or cut off: train with the new topic. "
            "What is given up is written to the audit topic.",
        ),
    ] = False,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Trains on rollouts and publishes adapters."""
    configure_logging("INFO")
    from tentalis.service.packages import require
    from trainer.config.file import load_config

    resolved = None if config is None else load_config(config, os.environ)
    if print_config:
        from trainer.config.commented import commented_yaml

        data().write(commented_yaml(resolved))
        return
    if resolved is None:
        raise CommandError("--config is missing. `tentalis train --print-config` prints a template", ExitCode.USAGE)
    if once and steps is not None:
        raise CommandError("--once is one step: omit --steps", ExitCode.USAGE)
    require("`tentalis train`", "train")
    from trainer.distributed.nodes import BadPlace, place_of
    from trainer.run.launch import main
    from trainer.run.stop_condition import StopCondition

    try:
        place = place_of(node, nodes, rendezvous)
    except BadPlace as error:
        raise CommandError(str(error), ExitCode.USAGE) from error

    stop_condition = StopCondition(1 if once else steps, caught_up=once or until_caught_up)
    settings = settings_of_role("trainer", bootstrap).model_copy(update={"accept_loss": accept_loss})
    raise typer.Exit(main(settings, resolved, ranks, port, stop_condition, place))
