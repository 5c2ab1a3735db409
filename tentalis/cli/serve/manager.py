"""`tentalis manager`: gives tasks and feedback."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, ScenarioName
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.agents.manager.curriculum import SolveRateRule


class CurriculumName(StrEnum):
    SOLVE_RATE = "solve-rate"


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
    curriculum: Annotated[
        CurriculumName | None,
        typer.Option(help="Choose prompts by their solve rates. Default: each prompt once, then all in a new order."),
    ] = None,
    hard_below: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Solve rate below which the curriculum sets a prompt aside. Default: 0.1."),
    ] = None,
    easy_above: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Solve rate above which the curriculum sets a prompt aside. Default: 0.9."),
    ] = None,
    probe: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the tasks that ask a new prompt. Default: 0.25."),
    ] = None,
    revisit: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the tasks that ask a prompt set aside. Default: 0.05."),
    ] = None,
    lowest_reward: Annotated[
        float | None,
        typer.Option(min=-1.0, max=1.0, help="Reward of an answer that is not solved; 1 is solved. Default: 0."),
    ] = None,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Sends the tasks of a scenario, and feedback as its simulated users; or the prompts of `tentalis learn`."""
    configure_logging("INFO")
    from tentalis.agents.manager import run

    given = {"low": hard_below, "high": easy_above, "probe": probe, "revisit": revisit, "lowest": lowest_reward}
    rule = _rule(curriculum, given)
    settings = settings_of_role("manager", bootstrap)
    raise typer.Exit(
        run(
            settings,
            scenario=scenario.value,
            run_id=run_id,
            n_samples=samples,
            metrics_port=port,
            prompts=prompts,
            curriculum=rule,
        )
    )


def _rule(curriculum: CurriculumName | None, settings: dict[str, float | None]) -> SolveRateRule | None:
    """Returns the curriculum that the options name, with its defaults for those that are not given.

    Raises CommandError.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if curriculum is None:
        if given:
            raise CommandError(
                "--hard-below, --easy-above, --probe, --revisit and --lowest-reward are settings of a curriculum: add "
                "`--curriculum solve-rate`",
                ExitCode.USAGE,
            )
        return None
    from tentalis.agents.manager.curriculum import BadCurriculum, SolveRateRule

    try:
        return SolveRateRule(**given)
    except BadCurriculum as error:
        raise CommandError(
            f"{error}. Change --hard-below, --easy-above, --probe, --revisit or --lowest-reward", ExitCode.USAGE
        ) from error
