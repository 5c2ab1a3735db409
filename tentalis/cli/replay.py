"""`tentalis replay`: trains a run again and compares every step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, emitter
from tentalis.cli.shared.set_option import parse_changes
from tentalis.cli.shared.settings import reached
from tentalis.cli.shared.startup import configure_logging
from tentalis.service.exit_codes import ExitCode

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Counterfactual run: same data in the same order, with this trainer setting; compared. Repeatable.",
    ),
]
RewardLabel = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        metavar="LABEL",
        help="Counterfactual run with the scores that `tentalis rescore` wrote under this label as the rewards.",
    ),
]
AllowUnscored = Annotated[
    bool,
    typer.Option("--allow-unscored", help="With --verifier: answers without such a score have no reward."),
]


def replay(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", min=0, help="First step to compare; training begins at the newest checkpoint before it."
        ),
    ] = None,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, help="Last step to train and compare.")] = None,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Check that every record is present and unaltered; train nothing.")
    ] = False,
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Train without missing or forgotten rollouts. Forged ones are refused."),
    ] = False,
    into: Annotated[Path | None, typer.Option("--into", help="Keep the replayed adapters in this folder.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Number of training processes, if different: compares within a tolerance."),
    ] = None,
    changes: Changes = None,
    verifier: RewardLabel = None,
    allow_unscored: AllowUnscored = False,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", help="Location of the base model, if it differs from the run's configuration."),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Trains a run again from its topics and compares the sha256 of every step.

    Exits with 0 only if all steps are equal; with --allow-missing, only those before the first that lacks a rollout
    must be. With --set or --verifier, trains a counterfactual run and compares it with the original.
    """
    wanted = parse_changes(changes or [])
    if (wanted or verifier is not None) and (verify_only or allow_missing or ranks):
        name = "--set" if wanted else "--verifier"
        raise CommandError(f"{name} cannot be combined with --verify-only, --allow-missing or --ranks", ExitCode.USAGE)
    if allow_unscored and verifier is None:
        raise CommandError("--allow-unscored needs --verifier: name the label of the scores", ExitCode.USAGE)
    if to_step is not None and to_step < (from_step or 0):
        raise CommandError(
            f"--to-step {to_step} is before --from-step {from_step}: no steps are selected", ExitCode.USAGE
        )
    if into is not None and into.exists():
        _check_empty(into)
    from tentalis.service.packages import require

    require("`tentalis replay`", "train")
    from tentalis.service.imports import without_collections
    from trainer.config.trainer_config import ConfigError

    with without_collections():
        from trainer.replay.show import main

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
                emit=emitter(output),
                ranks=ranks,
                changes=wanted,
                verifier=verifier,
                allow_unscored=allow_unscored,
            )
        except ConfigError as error:
            raise CommandError(str(error), ExitCode.USAGE if wanted else ExitCode.ERROR) from error
    raise typer.Exit(code)


def _check_empty(folder: Path) -> None:
    """Raises CommandError if the folder for the replayed adapters is a file, or holds anything."""
    wrong = "not a folder" if not folder.is_dir() else "not empty" if any(folder.iterdir()) else None
    if wrong:
        raise CommandError(
            f"--into {folder}: {wrong}. A replay needs a new or empty folder, and does not continue an earlier one: "
            "name another folder",
            ExitCode.USAGE,
        )
