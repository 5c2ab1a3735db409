"""Settings of commands, and the broker that they use. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.service.settings import Settings

# Names of the ports of the broker and the gateway in the local stack's ports.json.
BROKER_PORT, GATEWAY_PORT = "broker", "gateway"
# Address of a gateway that was started with no other one.
DEFAULT_GATEWAY = "http://127.0.0.1:8200"
# Seconds in which the broker must answer before a command starts its work.
PROBE_S = 5.0


def local_bootstrap(home: Path) -> str | None:
    """Returns the bootstrap server of the local stack that runs in a state directory, or None."""
    port = _local_port(home, BROKER_PORT)
    return f"127.0.0.1:{port}" if port else None


def gateway_url(given: str | None, home: Path) -> str:
    """Returns the URL of the gateway: the given one, else that of the local stack that runs in `home`, else the
    default one."""
    if given:
        return given
    port = _local_port(home, GATEWAY_PORT)
    return f"http://127.0.0.1:{port}" if port else DEFAULT_GATEWAY


def _local_port(home: Path, name: str) -> int | None:
    if not (home / "status.json").is_file():
        return None
    from tentalis.local.state import StateDir, read_whole

    status = StateDir(home).status()
    if status is None or not status["running"]:
        return None
    try:
        port: int | None = read_whole(home / "ports.json").get(name)
    except FileNotFoundError:  # a stack that has just begun to start
        return None
    return port


def resolve_settings(
    bootstrap: str | None = None, env: Mapping[str, str] = os.environ, *, join_stack: bool = True
) -> Settings:
    """Returns the settings of a command. The broker comes from the flag, the environment or the running local stack.

    `join_stack=False` ignores a running stack: for commands that start one. Raises CommandError,
    BadVariable, BadSecurity.
    """
    from tentalis.service import variables
    from tentalis.service.settings import Settings

    settings = Settings.from_env(env)
    if bootstrap:
        try:
            variables.BOOTSTRAP.kind.parse(bootstrap)
        except ValueError as error:
            allowed = variables.BOOTSTRAP.kind.allowed
            raise CommandError(f"--bootstrap-server {bootstrap}: give {allowed}", ExitCode.USAGE) from error
    named = bootstrap or settings.bootstrap
    if named or not join_stack:
        return settings.model_copy(update={"bootstrap": named})
    local = local_bootstrap(settings.home)
    if local is not None:
        settings.require_plaintext()
    return settings.model_copy(update={"bootstrap": local})


def connected_settings(bootstrap: str | None, timeout: float = PROBE_S) -> Settings:
    """Returns the settings once the broker has answered: commands fail in seconds, not after a minute of retries."""
    from tentalis.kafka.preflight import connect

    settings = resolve_settings(bootstrap)
    connect(settings, timeout)
    return settings


def settings_of_role(role: str, bootstrap: str | None) -> Settings:
    """Returns the settings of a process once the broker has confirmed the role's permissions on its topics.

    Raises Unreachable, Forbidden.
    """
    from tentalis.kafka.preflight import connect_as

    settings = resolve_settings(bootstrap)
    connect_as(settings, role)
    return settings


@contextmanager
def reached(bootstrap: str | None) -> Iterator[Settings]:
    """Yields `connected_settings`.

    If no Kafka is named and no stack runs, but the state directory holds a log, starts the broker on that log for the
    duration of the command.
    """
    settings = resolve_settings(bootstrap)
    if settings.bootstrap is None:
        from tentalis.local.attach import has_log

        if has_log(settings):
            typer.echo(f"no stack runs: starting the broker of {settings.home} for this command", err=True)
    with log_of(settings) as found:
        yield found


@contextmanager
def log_of(settings: Settings) -> Iterator[Settings]:
    """Yields settings whose broker has answered: the named one, that of the stack in the state directory, or one that
    is started on the log there meanwhile."""
    from tentalis.kafka.preflight import connect
    from tentalis.local.attach import broker_alone, has_log

    named = settings.bootstrap or local_bootstrap(settings.home)
    if named is None and has_log(settings):
        settings.require_plaintext()
        with broker_alone(settings) as alone:
            _wait_for_topics(alone)
            yield alone
        return
    found = settings.model_copy(update={"bootstrap": named})
    connect(found, PROBE_S)
    yield found


def _wait_for_topics(settings: Settings) -> None:
    """Waits until the broker leads all partitions: after a start, it lists topics before it serves them."""
    from tentalis.kafka.admin import KafkaAdmin, wait_visible

    admin = KafkaAdmin(settings)
    wait_visible(admin, admin.partitions())
