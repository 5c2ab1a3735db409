"""`tentalis manager`: gives tasks and feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.options import Bootstrap, MetricsPort, ScenarioName
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging


def manager(
    run_id: Annotated[str, typer.Option("--run", help="Id of the run that its tasks carry.")],
    scenario: Annotated[
        ScenarioName, typer.Option(help="Scenario of the tasks and of the simulated users.")
    ] = ScenarioName.ASSISTANT,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            exists=True,
            file_okay=False,
            help="Folder of prompts that `tentalis learn` prepared; replaces the scenario.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples per task. Default: the scenario's.")
    ] = None,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Sends the tasks of a scenario, and feedback as its simulated users; or the prompts of `tentalis learn`."""
    configure_logging("INFO")
    from tentalis.agents.manager import run

    settings = settings_of_role("manager", bootstrap)
    raise typer.Exit(
        run(
            settings,
            scenario=scenario.value,
            run_id=run_id,
            n_samples=samples,
            metrics_port=port,
            prompts=prompts,
        )
    )
