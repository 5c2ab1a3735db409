"""`tentalis serve policies`: promotes policies and loads their adapters."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tentalis.cli.serve.options import Server, ServerId
from tentalis.cli.shared.options import Bootstrap, MetricsPort
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging


class Promote(StrEnum):
    RUN = "run"
    ALWAYS = "always"
    MANUAL = "manual"
    NONE = "none"


class ServerDtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def policies(
    server: Server,
    server_id: ServerId = "local",
    promotion: Annotated[
        Promote,
        typer.Option(
            help="Promotion by this process: run follows the configuration of each run, always promotes every version, "
            "manual and none promote nothing."
        ),
    ] = Promote.RUN,
    dtype: Annotated[
        ServerDtype,
        typer.Option(
            help="Precision of the model server. The log-probs of a version's canary may differ from the trainer's by "
            "1e-3 in float32, 2e-2 in bfloat16 and float16. auto: as the server declares it, else float32."
        ),
    ] = ServerDtype.AUTO,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Follows the promotions on the log, loads their adapters into the model server and acknowledges them."""
    configure_logging("INFO")
    from tentalis.policies.process import serve

    serve(
        settings_of_role("policies", bootstrap),
        server=server,
        server_id=server_id,
        promotion=promotion.value,
        dtype=None if dtype is ServerDtype.AUTO else dtype.value,
        metrics_port=port,
    )
