"""Runs a stream application as a process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tentalis.cli.serve.options import StateStoreKind
from tentalis.cli.shared.settings import settings_of_role
from tentalis.cli.shared.startup import configure_logging

if TYPE_CHECKING:
    from tentalis.service.settings import Settings


def run_stream(
    name: str,
    build: Callable[[Settings], Any],
    *,
    bootstrap: str | None,
    port: int | None,
    instance: str | None,
    state: StateStoreKind,
    state_dir: Path | None,
    accept_loss: bool,
) -> NoReturn:
    """Runs the application `name`, which `build` makes, until SIGTERM. Raises typer.Exit with its exit code."""
    configure_logging("INFO")
    from streams.runtime.worker import StreamSettings, run
    from tentalis.service.health import host

    settings = settings_of_role(name, bootstrap)
    member = instance or (f"{socket.gethostname()}-{port}" if port else None)
    stream_settings = StreamSettings(
        bootstrap=settings.require_bootstrap(),
        state_dir=(state_dir or settings.home / "streams") / name,
        state=state.value,
        metrics_port=port,
        metrics_host=host(),
        security=settings.security,
        instance=member,
        accept_loss=accept_loss,
        dead_letters=settings.dead_letters,
    )
    raise typer.Exit(run(build(settings), stream_settings))
