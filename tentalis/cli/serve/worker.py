"""`tentalis worker`: answers tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.serve.options import Logprobs, Server, ServerId
from tentalis.cli.shared.options import Bootstrap, MetricsPort
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging


def worker(
    server: Server,
    environment: Annotated[str, typer.Option(help="Environment whose tasks it answers.")] = "chat",
    worker_id: Annotated[
        str | None, typer.Option("--worker-id", help="Id of the worker. Default: host name and environment.")
    ] = None,
    server_id: ServerId = "local",
    logprobs_mode: Annotated[
        Logprobs | None,
        typer.Option(
            "--logprobs-mode",
            help="Log-probs of the model server: raw, of the model's distribution; or processed, of the distribution "
            "that it samples from. Default: as the server declares it; raw for vLLM. Answers of which it is not known "
            "are scored, but not trained on.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of tasks answered at once.")] = 8,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Answers tasks with the newest policy that the model server has acknowledged."""
    configure_logging("INFO")
    from tentalis.agents.workers import run

    run(
        settings_of_role("worker", bootstrap),
        environment=environment,
        server=server,
        worker_id=worker_id,
        server_id=server_id,
        concurrency=concurrency,
        logprobs_mode=None if logprobs_mode is None else logprobs_mode.value,
        metrics_port=port,
    )
