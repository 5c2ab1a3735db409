"""`tentalis serve sessions`: the stream application that links the turns of conversations."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from tentalis.cli.serve.options import (
    AcceptLoss,
    Instance,
    MaxOpenBytes,
    SessionIdle,
    StateDir,
    StateStore,
    StateStoreKind,
)
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode


def sessions(
    idle: SessionIdle = variables.SESSION_IDLE.default,
    signals: Annotated[str, variable_option(variables.SIGNALS, "--signals")] = variables.SIGNALS.default,
    max_open_sessions: Annotated[
        int | None, variable_option(variables.MAX_OPEN_SESSIONS, "--max-open-sessions")
    ] = variables.MAX_OPEN_SESSIONS.default,
    max_open_bytes: MaxOpenBytes = variables.MAX_OPEN_BYTES.default,
    state: StateStore = StateStoreKind.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    accept_loss: AcceptLoss = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Reads session events; writes tasks, results, and feedback from each turn's next state."""
    from streams.apps.sessions.processor import build
    from streams.fold.admission_control import OpenBound
    from tentalis.signals import names_in

    try:
        names = names_in(signals)
    except ValueError as error:
        raise CommandError(f"--signals: {error}", ExitCode.USAGE) from error
    bound = OpenBound(max_open_sessions, max_open_bytes)
    make = partial(build, idle_ms=round(1000 * idle), signals=names, bound=bound)
    run_stream(
        "sessions",
        make,
        bootstrap=bootstrap,
        port=port,
        instance=instance,
        state=state,
        state_dir=state_dir,
        accept_loss=accept_loss,
    )
