"""`tentalis serve experience`: the stream application that extracts lessons of sessions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from tentalis.cli.serve.options import (
    AcceptLoss,
    Instance,
    Server,
    SessionIdle,
    StateDir,
    StateStore,
    StateStoreKind,
)
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.service import variables


def experience(
    server: Server,
    hinters: Annotated[
        Path,
        variable_option(
            variables.HINTERS,
            "--hinters",
            text="YAML file of the model that extracts lessons, and of the teacher (docs/concepts/hints.md).",
        ),
    ],
    idle: SessionIdle = variables.SESSION_IDLE.default,
    state: StateStore = StateStoreKind.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    accept_loss: AcceptLoss = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Reads sessions that ended; writes a lesson for each, with the teacher's log-probs of every turn under it."""
    from streams.apps.experience.processor import build
    from tentalis.opd.config import load_hinters

    make = partial(build, server=server, hinters=load_hinters(hinters), idle_ms=round(1000 * idle))
    run_stream(
        "experience",
        make,
        bootstrap=bootstrap,
        port=port,
        instance=instance,
        state=state,
        state_dir=state_dir,
        accept_loss=accept_loss,
    )
