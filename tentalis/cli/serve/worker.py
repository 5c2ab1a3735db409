"""`tentalis worker`: answers tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.serve.options import Logprobs, ServerId, checked_servers
from tentalis.cli.shared.environment_options import (
    AllowUnsandboxed,
    Attempts,
    EnvironmentFile,
    EnvironmentSeconds,
    Episodes,
    MaxTurns,
    Tasks,
    Tools,
)
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.cli.shared.settings import gateway_url, settings_of_role
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

Server = Annotated[str | None, variable_option(variables.SERVER, "--server", callback=checked_servers)]


OLLAMA = "http://localhost:11434"


def worker(
    server: Server = None,
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
            "that it samples from. The worker measures them; this counts only if it cannot. Default: as the server "
            "declares it; raw for vLLM, which declares nothing. Answers of which it is not known are scored, but not "
            "trained on.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Name of a model of the server that answers instead of the policy's versions: for Ollama and other "
            "servers that load no adapters. Its answers are scored, but not trained on.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of tasks answered at the same time.")] = 8,
    max_turns: MaxTurns = None,
    episodes: Episodes = 16,
    environment_seconds: EnvironmentSeconds = None,
    attempts: Attempts = None,
    hedge_after: Annotated[
        float | None,
        typer.Option(
            "--hedge-after",
            min=0.1,
            help="Seconds after which a sampling call without an answer is also sent to a second replica of the model "
            "server; the first answer counts. Default: never.",
            show_default=False,
        ),
    ] = None,
    environment_file: EnvironmentFile = None,
    tools: Tools = None,
    tasks: Tasks = None,
    allow_unsandboxed: AllowUnsandboxed = False,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Answers tasks with the newest policy that the model server has acknowledged, or with a plain model (--model).

    Without --server, the variables INFERENCE_BASE_URL, INFERENCE_BACKEND and VLLM_LORA_NAME name server and model.
    """
    configure_logging("INFO")
    url, named = model_server(server, model)
    from tentalis.agents.workers import EpisodeLimits, run

    settings = settings_of_role("worker", bootstrap)
    run(
        settings,
        environment=environment,
        server=url,
        worker_id=worker_id,
        server_id=server_id,
        concurrency=concurrency,
        logprobs_mode=None if logprobs_mode is None else logprobs_mode.value,
        api_key=variables.INFERENCE_API_KEY.read(),
        model=named,
        limits=EpisodeLimits.of(environment, episodes, max_turns, environment_seconds, attempts),
        tools=tools,
        tasks=tasks,
        allow_unsandboxed=allow_unsandboxed,
        metrics_port=port,
        hedge_after_s=hedge_after,
        gateway=gateway_url(variables.URL.read(), settings.home),
    )


def model_server(server: str | None, model: str | None) -> tuple[str, str | None]:
    """The URLs of the model server and the plain model to ask. Raises CommandError without a server."""
    if server is not None:
        return server, model
    url = variables.INFERENCE_BASE_URL.read()
    if url is None and variables.INFERENCE_BACKEND.read() == "ollama":
        url = OLLAMA
    if url is None:
        raise CommandError(
            f"no model server is named: give --server URL, or set {variables.SERVER.name} or "
            f"{variables.INFERENCE_BASE_URL.name}",
            ExitCode.USAGE,
        )
    return url, model or variables.VLLM_LORA_NAME.read()
