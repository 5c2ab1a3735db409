"""`tentalis serve gateway`: the OpenAI-compatible proxy that records conversations."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.serve.options import ListenPort, Logprobs
from tentalis.cli.serve.scorer_file import register_scorers
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, MetricsPort, variable_option
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.gateway.settings import GatewaySettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


OneServer = Annotated[
    str | None,
    variable_option(
        variables.SERVER,
        "--server",
        text="URL of the only backend, or of each of its replicas, separated by commas; without --config.",
    ),
]
OnePolicy = Annotated[
    str | None,
    typer.Option("--policy", help="Policy that the only backend answers with, whatever model the client names."),
]
OneServerId = Annotated[
    str,
    typer.Option("--server-id", help="Id of the only backend in the acknowledgements of adapters."),
]
LogprobsOption = Annotated[
    Logprobs,
    typer.Option(
        "--logprobs-mode",
        help="Log-probs of the only backend: raw, of the model's own distribution, as from vLLM by default; or "
        "processed, of the distribution that it samples from, as from `tentalis serve model` and `serve vllm`. The "
        "gateway measures them; this counts only if it cannot.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", exists=True, dir_okay=False, help="YAML file of backends, policies and limits."),
]
KeyFile = Annotated[
    Path | None,
    variable_option(
        variables.KEYS,
        "--keys",
        text="File of API keys (`tentalis keys`). Default: no keys, allowed on 127.0.0.1 only.",
    ),
]
NoKeys = Annotated[bool, typer.Option("--no-keys", help="Require no API key, on any address.")]
ScorerFile = Annotated[
    Path | None,
    variable_option(
        variables.SCORERS,
        "--scorers",
        text="The file of `tentalis serve scoring --scorers`, so that tasks may name its verifiers. Only the names are "
        "read.",
    ),
]
GatewayId = Annotated[
    str | None,
    typer.Option(
        "--gateway-id",
        help="Name of this gateway: unique, and the same after a restart. Default: host name and port.",
        show_default=False,
    ),
]
SpoolDir = Annotated[
    Path | None,
    typer.Option(
        "--spool-dir",
        help="Folder for turns while the broker is unreachable. Default: gateway/ID in TENTALIS_HOME.",
        show_default=False,
    ),
]
WaitForVersions = Annotated[
    bool,
    typer.Option(
        "--wait-for-versions",
        help="Ready only once the backend serves a version of the policy; until then it answers with the base model.",
    ),
]
DrainSeconds = Annotated[
    int | None,
    typer.Option(
        "--drain-s",
        min=0,
        help="Seconds that running answers may take after SIGTERM. Default: drain_s of --config, or 60.",
        show_default=False,
    ),
]


def gateway(
    server: OneServer = None,
    policy: OnePolicy = None,
    server_id: OneServerId = "local",
    logprobs_mode: LogprobsOption = Logprobs.RAW,
    config: Config = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: ListenPort = 8200,
    keys: KeyFile = None,
    no_keys: NoKeys = False,
    scorers: ScorerFile = None,
    gateway_id: GatewayId = None,
    spool_dir: SpoolDir = None,
    wait_for_versions: WaitForVersions = False,
    drain_s: DrainSeconds = None,
    metrics_port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Serves an OpenAI-compatible proxy that records conversations. Several gateways may serve one session."""
    configure_logging("INFO")
    from tentalis.gateway.process import serve

    if keys is None and not no_keys and host not in LOOPBACK:
        raise CommandError(
            f"--host {host} is open to other machines and no API keys are required: give a file of keys with --keys "
            "(`tentalis keys create` makes one), or --no-keys",
            ExitCode.USAGE,
        )
    if scorers is not None:
        register_scorers(scorers, names_only=True)
    gateway_settings = _gateway_settings(
        config,
        server,
        gateway_id=gateway_id or f"{socket.gethostname()}-{port}",
        server_id=server_id,
        policy=policy,
        logprobs=logprobs_mode,
    )
    if wait_for_versions:
        gateway_settings = gateway_settings.model_copy(update={"wait_for_versions": True})
    if drain_s is not None:
        gateway_settings = gateway_settings.model_copy(update={"drain_s": drain_s})
    settings = settings_of_role("gateway", bootstrap)
    serve(
        gateway_settings,
        settings,
        host=host,
        port=port,
        keys=keys,
        spool=spool_dir or settings.home / "gateway" / gateway_settings.gateway_id,
        local=keys is None and not no_keys,
        metrics_port=metrics_port,
    )


def _gateway_settings(
    config: Path | None, server: str | None, *, gateway_id: str, server_id: str, policy: str | None, logprobs: Logprobs
) -> GatewaySettings:
    """Returns the settings of the file, or of the only backend. Raises CommandError."""
    from schemas.records import LogprobsMode
    from tentalis.gateway.settings import GatewaySettings

    if config is not None:
        return GatewaySettings.from_file(config, gateway_id=gateway_id)
    if server is not None:
        mode = LogprobsMode(logprobs.value)
        return GatewaySettings.simple(
            server, server_id=server_id, policy=policy, gateway_id=gateway_id, logprobs_mode=mode
        )
    raise CommandError("no backend is given: name one with --server URL, or several in --config FILE", ExitCode.USAGE)
