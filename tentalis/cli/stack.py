"""`tentalis up`, `down`, `status`: the local stack under its supervisor."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from tentalis.config import Settings

READY_TIMEOUT = 900.0
# Without a scenario nobody paces the tasks: answers of somewhat older versions are still worth training on.
STANDING_STALENESS = 4
# The detached stack says on this file descriptor that it is ready; that it closes without a word says that it ended.
READY_FD = "TENTALIS_READY_FD"

PolicyModel = Annotated[
    str | None,
    typer.Option("--policy-model", help="Folder or hub id of the model. Default: SmolLM2-135M-Instruct."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        help="The trainer's YAML file. Default: goes on with the run that was begun last here.",
    ),
]


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready; it stays.")] = False,
    policy_model: PolicyModel = None,
    config: Config = None,
) -> None:
    """Starts the whole stack on this machine and stays until Ctrl-C. What was begun before goes on from the log."""
    configure_logging("INFO")
    settings = resolve_settings(join_stack=False)
    if detach:
        _detached(settings.home, policy_model, config)
    else:
        _attached(settings, policy_model, config)


def _attached(settings: Settings, policy_model: str | None, config: Path | None) -> None:
    from tentalis.inference.models import resolve_model
    from tentalis.local.stack import StackOptions, build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor, stop_signals

    ready_fd = os.environ.pop(READY_FD, None)  # popped: the processes of the stack must not inherit it
    with ExitStack() as held:
        state = held.enter_context(StateDir(settings.home))
        # Before signals are only noted: a download must end with Ctrl-C like anything else.
        if config is None:
            model, run, environment = _standing_run(state.folder("runs"), policy_model, settings.cache)
        else:
            model, run, environment = resolve_model(policy_model, settings.cache), config.absolute(), "chat"
        stop = held.enter_context(stop_signals())
        options = StackOptions(state=state, settings=settings, model=model, trainer_config=run, environment=environment)
        stack = build_stack(options)
        staying = [spec.name for spec in stack.specs if not spec.expect_exit]
        supervisor = Supervisor(state, stack.specs)
        supervisor.start()
        try:
            ready = False
            while not stop.wait(0.2):
                if failure := supervisor.failure():
                    raise CommandError(failure)
                states = supervisor.status()
                if not ready and all(states[name]["state"] == "ready" for name in staying):
                    ready = True
                    typer.echo(
                        f"ready: Kafka on {stack.settings.bootstrap}, model server on {stack.server}. "
                        "`tentalis status` shows the processes, Ctrl-C or `tentalis down` stops them",
                        err=True,
                    )
                    if ready_fd is not None:
                        os.write(int(ready_fd), b"ready")
                        os.close(int(ready_fd))
        finally:
            supervisor.stop()


def _standing_run(runs: Path, policy_model: str | None, cache: Path) -> tuple[Path, Path, str]:
    """Model folder, trainer configuration and environment of what was begun last in this state directory, without an
    end: what it has learned goes on being served and trained. A new run where there is none, or one of another model.
    """
    from tentalis.demo.runs import newest
    from tentalis.inference.models import resolve_model
    from tentalis.scenarios import make_scenario
    from trainer.config import TrainerConfig, config_text, load_config

    found = newest(runs)
    last = load_config(found.config) if found is not None else None
    model = resolve_model(policy_model or (last.base_model if last is not None else None), cache)
    if found is not None and last is not None and Path(last.base_model) == model:
        environment = make_scenario(found.scenario).environment if found.scenario else "chat"
        config = last.model_copy(update={"steps": None, "max_staleness": max(last.max_staleness, STANDING_STALENESS)})
        path = found.folder / "standing.yaml"
    else:
        environment, run_id = "chat", time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())
        config = TrainerConfig(run_id=run_id, policy="assistant", base_model=str(model), base_model_name=model.name)
        path = runs / run_id / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_text(config), encoding="utf-8")
    return model, path, environment


def _detached(home: Path, policy_model: str | None, config: Path | None) -> None:
    from tentalis.local.state import StateDir

    state = StateDir(home)
    if state.holder() is not None:
        raise CommandError(f"a stack runs in {home} already; `tentalis status` shows it")
    log = state.folder("logs") / "up.log"
    command = [sys.executable, "-m", "tentalis.cli", "up"]
    command += ["--policy-model", policy_model] if policy_model else []
    command += ["--config", str(config)] if config else []
    read_end, write_end = os.pipe()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            env=os.environ | {READY_FD: str(write_end)},
            pass_fds=[write_end],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    os.close(write_end)
    heard, _, _ = select.select([read_end], [], [], READY_TIMEOUT)
    word = os.read(read_end, 16) if heard else b""
    os.close(read_end)
    if not heard:
        raise CommandError(f"not ready after {READY_TIMEOUT:g} s; it goes on, see `tentalis status` and {log}")
    if not word:
        code = process.wait(30)
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise CommandError(f"the stack ended with exit code {code}; the end of {log}:\n{tail}")
    typer.echo("ready: `tentalis status` shows the processes, `tentalis down` stops them", err=True)


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
