"""`tentalis serve join`: the stream application that joins halves to rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tentalis.cli.serve.options import AcceptLoss, Instance, MaxOpenBytes, StateDir, StateStore, StateStoreKind
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from streams.apps.join.processor import JoinProcessor
    from tentalis.service.settings import Settings


def join(
    marker_ttl: Annotated[
        float,
        variable_option(variables.MARKER_TTL, "--marker-ttl"),
    ] = variables.MARKER_TTL.default,
    max_open_tasks: Annotated[
        int | None, variable_option(variables.MAX_OPEN_TASKS, "--max-open-tasks")
    ] = variables.MAX_OPEN_TASKS.default,
    max_open_bytes: MaxOpenBytes = variables.MAX_OPEN_BYTES.default,
    state: StateStore = StateStoreKind.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    accept_loss: AcceptLoss = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Reads halves; writes rollouts and outcomes."""
    from streams.apps.join.processor import JoinProcessor, limits_of
    from streams.fold.admission_control import OpenBound
    from tentalis.kafka.codec import make_codec

    bound = OpenBound(max_open_tasks, max_open_bytes)
    try:
        limits = limits_of(round(1000 * marker_ttl))
    except ValueError as error:
        raise CommandError(f"--marker-ttl {marker_ttl:g} (TENTALIS_MARKER_TTL): {error}", ExitCode.USAGE) from error

    def make(settings: Settings) -> JoinProcessor:
        return JoinProcessor(make_codec(settings, patience=0.0), limits, bound=bound)

    run_stream(
        "join",
        make,
        bootstrap=bootstrap,
        port=port,
        instance=instance,
        state=state,
        state_dir=state_dir,
        accept_loss=accept_loss,
    )
