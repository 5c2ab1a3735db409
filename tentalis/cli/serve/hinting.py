"""`tentalis serve hinting`: the stream application that turns feedback into hints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.serve.options import (
    HOUR_S,
    AcceptLoss,
    FeedbackHorizon,
    Instance,
    Server,
    StateDir,
    StateStore,
    StateStoreKind,
)
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode


def hinting(
    server: Server,
    hinters: Annotated[
        Path | None,
        variable_option(
            variables.HINTERS,
            "--hinters",
            text="YAML file of the hinter of each environment, and of the teacher (docs/concepts/hints.md). Default: "
            "the rule hinter in every environment, and the server's base model.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="Model or adapter on the server that teaches, without --hinters. Default: the base model."),
    ] = None,
    teacher_top: Annotated[
        int,
        typer.Option(
            "--teacher-top",
            min=0,
            max=20,
            help="Number of most likely tokens that the teacher gives per token, without --hinters.",
        ),
    ] = 0,
    feedback_horizon: FeedbackHorizon = HOUR_S,
    state: StateStore = StateStoreKind.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    accept_loss: AcceptLoss = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Reads feedback; writes hints with the teacher's log-probs."""
    from streams.apps.hinting.processor import build
    from tentalis.opd.config import Hinters, TeacherSettings, load_hinters

    if hinters is not None and (teacher is not None or teacher_top):
        raise CommandError(
            f"--teacher and --teacher-top cannot be combined with --hinters: set teacher.model and teacher.top in "
            f"{hinters}",
            ExitCode.USAGE,
        )
    chosen = Hinters(teacher=TeacherSettings(model=teacher, top=teacher_top))
    if hinters is not None:
        chosen = load_hinters(hinters)
    make = partial(build, server=server, hinters=chosen, feedback_horizon_ms=round(1000 * feedback_horizon))
    run_stream(
        "hinting",
        make,
        bootstrap=bootstrap,
        port=port,
        instance=instance,
        state=state,
        state_dir=state_dir,
        accept_loss=accept_loss,
    )
