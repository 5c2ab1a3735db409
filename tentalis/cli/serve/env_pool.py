"""`tentalis serve env-pool`: environments for other machines, over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.serve.gateway import LOOPBACK
from tentalis.cli.serve.options import ListenPort
from tentalis.cli.shared.environment_options import AllowUnsandboxed, EnvironmentFile, Tasks, Tools
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode


def env_pool(
    environment: Annotated[str, typer.Option(help="Environment of the episodes.")] = "toolcall",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: ListenPort = 18081,
    places: Annotated[int, typer.Option(min=1, help="Number of episodes at the same time.")] = 16,
    lease_seconds: Annotated[
        float,
        typer.Option("--lease-seconds", min=1, help="Seconds without a call or a heartbeat until a lease expires."),
    ] = 120.0,
    call_seconds: Annotated[
        float, typer.Option("--call-seconds", min=1, help="Seconds of one call, such as a step or the score.")
    ] = 600.0,
    environment_file: EnvironmentFile = None,
    tools: Tools = None,
    tasks: Tasks = None,
    allow_unsandboxed: AllowUnsandboxed = False,
) -> None:
    """Offers an environment to workers of other machines (their environment env-pool), and to clients of OpenClaw-RL's
    terminal pool. TENTALIS_ENV_POOL_KEY is the key that calls must carry; without it only 127.0.0.1 is allowed."""
    configure_logging("INFO")
    from tentalis.agents.environments.registry import BadEnvironment, prepared_environment
    from tentalis.agents.pool.leases import PoolLimits
    from tentalis.agents.pool.process import serve
    from tentalis.rewards.environment_file import TAKES_SERVER
    from tentalis.rewards.registry import declared_environments

    key = variables.ENV_POOL_KEY.read()
    if key is None and host not in LOOPBACK:
        raise CommandError(
            f"--host {host} is open to other machines, whose programs could run commands here: set a key in "
            f"{variables.ENV_POOL_KEY.name}, such as that of `openssl rand -hex 32`",
            ExitCode.USAGE,
        )
    declared = declared_environments().get(environment)
    if (environment if declared is None else declared.base) in TAKES_SERVER:
        raise CommandError(f"{environment} is itself played on another pool: name that environment", ExitCode.USAGE)
    make = prepared_environment(environment, tools=tools, tasks=tasks, allow_unsandboxed=allow_unsandboxed)
    if make is None:
        raise BadEnvironment(f"no environment {environment!r} with episodes: see `tentalis env list`")
    limits = PoolLimits(places, lease_seconds, call_seconds)
    serve(make, environment, host=host, port=port, key=key, limits=limits)
