"""`tentalis serve scoring`: the stream application that scores results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from tentalis.cli.serve.options import (
    HOUR_S,
    AcceptLoss,
    FeedbackHorizon,
    Instance,
    StateDir,
    StateStore,
    StateStoreKind,
)
from tentalis.cli.serve.scorer_file import register_scorers
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.service import variables


def scoring(
    scorers: Annotated[
        Path | None,
        variable_option(variables.SCORERS, "--scorers"),
    ] = None,
    feedback_horizon: FeedbackHorizon = HOUR_S,
    state: StateStore = StateStoreKind.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    accept_loss: AcceptLoss = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Reads tasks, results and feedback; writes opens and scores."""
    if scorers is not None:
        register_scorers(scorers)
    from streams.apps.scoring.processor import build

    make = partial(build, feedback_horizon_ms=round(1000 * feedback_horizon))
    run_stream(
        "scoring",
        make,
        bootstrap=bootstrap,
        port=port,
        instance=instance,
        state=state,
        state_dir=state_dir,
        accept_loss=accept_loss,
    )
