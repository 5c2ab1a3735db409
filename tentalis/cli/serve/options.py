"""Options of several processes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.options import variable_option
from tentalis.service import variables
from tentalis.service.variable import HIGHEST_PORT

ListenPort = Annotated[int, typer.Option("--port", min=0, max=HIGHEST_PORT, help="Port to listen on.")]
HOUR_S = variables.HOUR_S


class StateStoreKind(StrEnum):
    MEMORY = "memory"
    ROCKSDB = "rocksdb"


class Logprobs(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


def checked_servers(value: str | None) -> str | None:
    """Returns the URLs of --server. Raises BadVariable."""
    return None if value is None else variables.SERVER.parse(value)


Server = Annotated[str, variable_option(variables.SERVER, "--server", callback=checked_servers)]
ServerId = Annotated[
    str, typer.Option("--server-id", help="Id of the model server in the acknowledgements of adapters.")
]
Instance = Annotated[
    str | None,
    typer.Option(
        "--instance",
        help="Name of this process in the consumer group: unique, and the same after a restart, so that it keeps its "
        "partitions. Default: host name and metrics port, if there is one.",
        show_default=False,
    ),
]
StateStore = Annotated[StateStoreKind, variable_option(variables.STATE, "--state")]
StateDir = Annotated[Path | None, variable_option(variables.STATE_DIR, "--state-dir")]
MaxOpenBytes = Annotated[int | None, variable_option(variables.MAX_OPEN_BYTES, "--max-open-bytes")]
SessionIdle = Annotated[float, variable_option(variables.SESSION_IDLE, "--idle")]
AcceptLoss = Annotated[bool, variable_option(variables.ACCEPT_LOSS, "--accept-loss")]
FeedbackHorizon = Annotated[
    float,
    typer.Option(
        "--feedback-horizon",
        min=0.0,
        help="Feedback that does not carry its result is paired with a result of its task at most this many seconds of "
        "log time away; 0 ignores such feedback.",
    ),
]
