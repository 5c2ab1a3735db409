"""`tentalis serve NAME` for every stream application of the topology without further options."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

from tentalis.cli.serve.options import AcceptLoss, Instance, StateDir, StateStore, StateStoreKind
from tentalis.cli.serve.stream import run_stream
from tentalis.cli.shared.options import Bootstrap, MetricsPort
from tentalis.kafka import topology
from tentalis.kafka.topology import Application


def add_plain_streams(serve: typer.Typer) -> None:
    """Adds a command for each stream application of the topology that has none yet.

    Such an application needs only `build(settings)` in `streams.apps.NAME.processor`.
    """
    present = {command.name or getattr(command.callback, "__name__", "") for command in serve.registered_commands}
    for each in topology.streams():
        if each.name not in present:
            serve.command(each.name, short_help=each.purpose)(_command_of(each))


def _command_of(application: Application) -> Callable[..., None]:
    def command(
        state: StateStore = StateStoreKind.MEMORY,
        state_dir: StateDir = None,
        port: MetricsPort = None,
        instance: Instance = None,
        accept_loss: AcceptLoss = False,
        bootstrap: Bootstrap = None,
    ) -> None:
        build = import_module(f"streams.apps.{application.name}.processor").build
        run_stream(
            application.name,
            build,
            bootstrap=bootstrap,
            port=port,
            instance=instance,
            state=state,
            state_dir=state_dir,
            accept_loss=accept_loss,
        )

    command.__doc__ = application.purpose
    return command
