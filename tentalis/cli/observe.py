"""`tentalis observe`: writes the settings of a Prometheus and a Grafana that watch the local stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import DryRun
from tentalis.cli.shared.output import Format, OutputFormat, show
from tentalis.cli.shared.settings import resolve_settings


def observe(
    into: Annotated[
        Path | None, typer.Option("--into", help="Folder to write. Default: observe in the state directory.")
    ] = None,
    prometheus: Annotated[
        str, typer.Option("--prometheus", help="Address at which Grafana reaches Prometheus.")
    ] = "http://127.0.0.1:9090",
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes the scrape configuration, alert rules and dashboards for the running local stack.

    Ports stay the same over restarts. After `up` with more processes, run it again."""
    from tentalis.local.observe import SUPERVISOR, settings_files
    from tentalis.local.state import StateDir

    home = resolve_settings(join_stack=False).home
    status = StateDir(home).status()
    if status is None:
        raise CommandError(f"no stack runs in {home}: start it with `tentalis up`, then run this again")
    ports = {name: each["port"] for name, each in status["processes"].items() if each.get("port")}
    if status.get("port"):
        ports[SUPERVISOR] = status["port"]
    folder = (into or home / "observe").absolute()
    found = settings_files(ports, folder, prometheus)
    for name, text in found.items():
        if not dry_run:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    show(output, ("file", "bytes"), [{"file": str(folder / name), "bytes": len(text)} for name, text in found.items()])
    typer.echo(
        "nothing was written"
        if dry_run
        else f"prometheus --config.file={folder / 'prometheus.yml'}\n"
        f"GF_PATHS_PROVISIONING={folder / 'grafana'} grafana server",
        err=True,
    )
