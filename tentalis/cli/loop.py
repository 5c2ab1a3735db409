"""`tentalis demo`, `replay` and `verify`: a run, the same run again, and whether it was right."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tentalis.cli.common import (
    ERROR,
    USAGE,
    Bootstrap,
    CommandError,
    Format,
    Output,
    before_a_stack,
    configure_logging,
    print_json,
    print_table,
    reached,
    resolve_settings,
    shortened,
)


class Scenario(StrEnum):
    ASSISTANT = "assistant"
    MATH = "math"


def demo(
    scenario: Annotated[Scenario, typer.Option(help="What the simulated users ask for.")] = Scenario.ASSISTANT,
    steps: Annotated[int, typer.Option(min=1, help="Policy versions to train.")] = 15,
    policy_model: Annotated[
        str | None,
        typer.Option("--policy-model", help="Folder or hub id of the model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack running afterwards.")] = False,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes that train together.")] = 1,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="A setting of the trainer, as loss=dapo. Repeatable."),
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """The whole loop on a real Kafka with a real model, from nothing to a visibly better policy."""
    from tentalis import demo as the_demo

    settings = resolve_settings(join_stack=False)
    before_a_stack(settings)
    # What is wrong with them is said before a model is fetched.
    _configured(dict.fromkeys(("run_id", "policy", "base_model", "base_model_name"), "demo"), tuple(changes or ()))
    code = the_demo.run(
        settings,
        scenario=scenario.value,
        steps=steps,
        policy_model=policy_model,
        keep=keep,
        ranks=ranks,
        changes=tuple(changes or ()),
        configured=_configured,
        as_json=output is Output.JSON,
    )
    raise typer.Exit(code)


def _configured(config: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """The trainer's settings with those of --set in place. Raises CommandError."""
    from trainer.config import ConfigError, TrainerConfig
    from trainer.config_file import overridden

    if not changes:
        return config
    try:
        changed = overridden(TrainerConfig.model_validate(config), _settings_of(list(changes)), "--set")
    except ConfigError as error:
        raise CommandError(str(error), USAGE) from error
    return changed.model_dump(mode="json")


def replay(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", min=0, help="First step to compare; training begins at the newest checkpoint before it."
        ),
    ] = None,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, help="Last step to train again.")] = None,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Check that every record is there and unaltered; train nothing.")
    ] = False,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing", help="Train without rollouts that are missing or forgotten; forged are refused."
        ),
    ] = False,
    into: Annotated[Path | None, typer.Option("--into", help="Keep the replayed adapters in this folder.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Train in another number of processes: compared within a tolerance."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTING=VALUE",
            help="What if: the same data in the same order with this setting of the trainer, side by side. Repeatable.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", help="Where the base model is now, if not where the run's configuration says."),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Trains a run again from its topics and compares the sha256 of every step.

    Exits with 0 only if all are equal; with --allow-missing, all before the first that lacks a rollout. With --set it
    trains a counterfactual run and compares the two.
    """
    wanted = _settings_of(changes or [])
    if wanted and (verify_only or allow_missing or ranks):
        raise CommandError("--set goes with none of --verify-only, --allow-missing, --ranks", USAGE)
    if to_step is not None and to_step < (from_step or 0):
        raise CommandError(f"--to-step {to_step} is before --from-step {from_step}: there is nothing between", USAGE)
    if into is not None and into.exists():
        wrong = "no folder" if not into.is_dir() else "not empty" if any(into.iterdir()) else None
        if wrong:
            raise CommandError(
                f"--into {into}: {wrong}. A replay keeps its files in a folder of its own, and goes on from no other "
                "replay's: name a new one",
                USAGE,
            )
    from trainer.config import ConfigError
    from trainer.replay_show import main

    configure_logging("INFO")
    with reached(bootstrap) as settings:
        try:
            code = main(
                settings,
                run,
                from_step=from_step,
                to_step=to_step,
                verify_only=verify_only,
                allow_missing=allow_missing,
                into=into,
                base_model=base_model,
                as_json=output is Output.JSON,
                ranks=ranks,
                changes=wanted,
            )
        except ConfigError as error:
            raise CommandError(str(error), USAGE if wanted else ERROR) from error
    raise typer.Exit(code)


def _settings_of(changes: list[str]) -> dict[str, str]:
    for change in changes:
        if "=" not in change:
            raise CommandError(f"--set {change}: SETTING=VALUE is expected, such as optimizer.lr=1e-4", USAGE)
    return {name.strip(): value for name, _, value in (change.partition("=") for change in changes)}


def verify(
    run: Annotated[str, typer.Argument(help="Id of the run, as its tasks carry it.")],
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until open tasks have closed.")] = 0.0,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Tasks that are still open are counted, but are no problem.")
    ] = False,
    feedback_horizon: Annotated[
        float,
        typer.Option("--feedback-horizon", min=0.0, help="What scoring and hinting run with, if not their default."),
    ] = 3600.0,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Checks a run from its topics alone: nothing lost, nothing twice, no two answers mixed. Exits with 0 if so."""
    from tentalis.verify import verify as verify_run

    with reached(bootstrap) as settings:
        report = verify_run(
            settings,
            run,
            wait=wait,
            allow_open=allow_open,
            feedback_horizon_ms=round(1000 * feedback_horizon),
        )
    if output is Output.JSON:
        print_json(report.as_dict())
    else:
        print_table(("what", "count"), report.counts())
        if report.unreadable:
            print("\npassed over, no record:", *shortened(report.unreadable), sep="\n")
        if report.problems:
            print()
            print_table(("rule", "where", "problem"), [(p.rule, p.where, p.message) for p in report.problems])
        number = len(report.problems)
        print(f"\n{number or 'no'} problem{'' if number == 1 else 's'}")
    if report.problems:
        raise typer.Exit(ERROR)
