"""`tentalis demo`: plays a whole run with simulated users."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.options import ScenarioName
from tentalis.cli.shared.output import Format, OutputFormat, emitter
from tentalis.cli.shared.policy_model import PolicyModel
from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.stack_checks import check_before_start
from tentalis.cli.shared.trainer_changes import check_changes, configured


def demo(
    scenario: Annotated[
        ScenarioName, typer.Option(help="Scenario that the simulated users play.")
    ] = ScenarioName.ASSISTANT,
    steps: Annotated[int, typer.Option(min=1, help="Policy versions to train.")] = 15,
    policy_model: PolicyModel = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack running afterwards.")] = False,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of training processes.")] = 1,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="Trainer setting, such as loss=dapo. Repeatable."),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Runs the whole loop on a real Kafka with a real model, from an empty log to a visibly better policy."""
    from tentalis.service.packages import require

    math = ["math"] if scenario is ScenarioName.MATH else []
    require("`tentalis demo`", "local", *math, "serve", "train")
    from tentalis import demo as the_demo

    settings = resolve_settings(join_stack=False)
    check_before_start(settings)
    check_changes(tuple(changes or ()))
    code = the_demo.run(
        settings,
        scenario=scenario.value,
        steps=steps,
        policy_model=policy_model,
        keep=keep,
        ranks=ranks,
        changes=tuple(changes or ()),
        configured=configured,
        emit=emitter(output),
    )
    raise typer.Exit(code)
