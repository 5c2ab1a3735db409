"""`tentalis up`, `down`, `status`: the local stack under its supervisor."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tentalis.cli.common import (
    ERROR,
    CommandError,
    Format,
    Output,
    configure_logging,
    print_json,
    print_table,
    resolve_settings,
)

READY_TIMEOUT = 900.0


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready; it stays.")] = False,
    policy_model: Annotated[
        str | None,
        typer.Option("--policy-model", help="Folder or hub id of the model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            exists=True,
            dir_okay=False,
            help="The trainer's YAML file. Default: trainer.yaml in the state directory.",
        ),
    ] = None,
) -> None:
    """Starts the whole stack on this machine and stays until Ctrl-C. What was begun before goes on from the log."""
    configure_logging("INFO")
    settings = resolve_settings(join_stack=False)
    if detach:
        _detached(settings.home, policy_model, config)
        return
    from tentalis.inference.models import resolve_model
    from tentalis.local.stack import StackOptions, build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor, stop_signals

    with StateDir(settings.home) as state, stop_signals() as stop:
        model = resolve_model(policy_model, settings.cache)
        run = config.absolute() if config else _standing_run(settings.home / "trainer.yaml", model)
        stack = build_stack(StackOptions(state=state, settings=settings, model=model, trainer_config=run))
        supervisor = Supervisor(state, stack.specs)
        supervisor.start()
        try:
            while not stop.wait(0.5):
                if failure := supervisor.failure():
                    raise CommandError(failure)
        finally:
            supervisor.stop()


def _standing_run(path: Path, model: Path) -> Path:
    """The trainer's configuration of this state directory: written once, so that a second start resumes the run."""
    if not path.exists():
        from trainer.config import TrainerConfig, config_text

        run_id = time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())
        config = TrainerConfig(run_id=run_id, policy="assistant", base_model=str(model), base_model_name=model.name)
        path.write_text(config_text(config), encoding="utf-8")
    return path


def _detached(home: Path, policy_model: str | None, config: Path | None) -> None:
    from tentalis.local.state import StateDir

    state = StateDir(home)
    if state.holder() is not None:
        raise CommandError(f"a stack runs in {home} already; `tentalis status` shows it")
    log = state.folder("logs") / "up.log"
    command = [sys.executable, "-m", "tentalis.cli", "up"]
    command += ["--policy-model", policy_model] if policy_model else []
    command += ["--config", str(config)] if config else []
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        if process.poll() is not None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise CommandError(f"the stack ended with exit code {process.returncode}; the end of {log}:\n{tail}")
        status = state.status()
        states = {name: entry["state"] for name, entry in (status or {}).get("processes", {}).items()}
        if status and status["running"] and states and set(states.values()) <= {"ready", "done"}:
            typer.echo(
                f"{len(states)} processes are ready; `tentalis status` shows them, `tentalis down` ends them", err=True
            )
            return
        if time.monotonic() > deadline:
            waiting = ", ".join(f"{name} {state}" for name, state in states.items() if state not in ("ready", "done"))
            raise CommandError(f"not ready after {READY_TIMEOUT:g} s ({waiting}); it goes on. The log is {log}")
        time.sleep(0.2)


def down() -> None:
    """Stops the local stack cleanly and leaves its data."""
    from tentalis.local.state import request_stop

    home = resolve_settings(join_stack=False).home
    pid = request_stop(home)
    typer.echo(f"no stack runs in {home}" if pid is None else f"stopped the stack in {home} (process {pid})", err=True)


def status(output: Format = Output.TABLE) -> None:
    """The processes of the local stack. Exits with 1 if none runs or one has failed."""
    from tentalis.local.state import StateDir

    home = resolve_settings(join_stack=False).home
    found: dict[str, Any] = StateDir(home).status() or {"running": False, "processes": {}}
    if output is Output.JSON:
        print_json({"home": str(home), **found})
    elif not found["running"]:
        print(f"no stack runs in {home}")
    else:
        print_table(
            ("process", "state", "pid", "uptime", "restarts", "last exit", "message"),
            [
                (name, p["state"], p["pid"], _seconds(p["uptime"]), p["restarts"], p["last_exit"], _line(p["message"]))
                for name, p in found["processes"].items()
            ],
        )
    if not found["running"] or any(p["state"] == "failed" for p in found["processes"].values()):
        raise typer.Exit(ERROR)


def _seconds(uptime: float | None) -> str | None:
    return None if uptime is None else f"{uptime:.0f} s"


def _line(message: str) -> str | None:
    return message.splitlines()[0] if message else None
