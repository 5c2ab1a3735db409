"""`tentalis up`, `down`, `status`: the local stack under its supervisor."""

from __future__ import annotations

import logging
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
    before_a_stack,
    configure_logging,
    print_json,
    print_table,
    resolve_settings,
)
from tentalis.service import NEEDS_PERSON, STOPPED, UNMENDABLE

if TYPE_CHECKING:
    from tentalis.config import Settings

READY_TIMEOUT = 900.0
# Without a scenario nobody paces the tasks: answers of somewhat older versions are still worth training on.
STANDING_STALENESS = 4
# The supervisor writes its status every second.
STALE_S = 15.0
# Longer than the trainer takes to start, and than the first retry of an adapter that was refused.
SETTLE_S = 40.0
# The detached stack says on this file descriptor that it is ready; that it closes without a word says that it ended.
READY_FD = "TENTALIS_READY_FD"
READY = "ready"
_BAD = ("failed", "halted", "degraded")

log = logging.getLogger(__name__)

PolicyModel = Annotated[
    str | None,
    typer.Option("--policy-model", help="Folder or hub id of the model. Default: SmolLM2-135M-Instruct."),
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes that train together.")]
Gateway = Annotated[
    bool,
    typer.Option("--gateway", help="Start a gateway too: an OpenAI-compatible endpoint that learns from its use."),
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
    ranks: Ranks = 1,
    gateway: Gateway = False,
) -> None:
    """Starts the whole stack on this machine and stays until Ctrl-C. What was begun before goes on from the log."""
    configure_logging("INFO")
    settings = resolve_settings(join_stack=False)
    before_a_stack(settings)
    if detach:
        _detached(settings.home, policy_model, config, ranks, gateway)
    else:
        _attached(settings, policy_model, config, ranks, gateway)


def _attached(settings: Settings, policy_model: str | None, config: Path | None, ranks: int, gateway: bool) -> None:
    from tentalis.inference.models import resolve_model
    from tentalis.local.stack import StackOptions, build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor, signals_unwind, stop_signals

    ready_fd = os.environ.pop(READY_FD, None)  # popped: the processes of the stack must not inherit it
    with ExitStack() as held:
        # Before signals are only noted: a download must end with Ctrl-C, or `tentalis down`, like anything else.
        held.enter_context(signals_unwind())
        state = held.enter_context(StateDir(settings.home))
        if config is None:
            model, run, environment = _standing_run(state.folder("runs"), policy_model, settings.cache)
        else:
            model, run, environment = resolve_model(policy_model, settings.cache), config.absolute(), "chat"
        stop = held.enter_context(stop_signals())
        stack = build_stack(
            StackOptions(
                state=state,
                settings=settings,
                model=model,
                trainer_config=run,
                environment=environment,
                ranks=ranks,
                gateway=_policy_of(run) if gateway else None,
            )
        )
        staying = [spec.name for spec in stack.specs if not spec.expect_exit]
        supervisor = Supervisor(state, stack.specs)
        supervisor.start()
        try:
            said, unready_since = None, time.monotonic()
            while not stop.wait(0.2):
                if failure := supervisor.failure():
                    raise CommandError(failure, UNMENDABLE if supervisor.unmendable() else ERROR)
                word = _word({name: one for name, one in supervisor.status().items() if name in staying})
                if word is None or word == READY:
                    unready_since = time.monotonic()
                # What is not ready may still become so: the trainer writes an adapter again that was missing.
                if word in (None, said) or (word != READY and time.monotonic() - unready_since < SETTLE_S):
                    continue
                said = word
                if ready_fd is not None:  # the first word goes to whoever waits; what comes later is in the log
                    os.write(int(ready_fd), word.encode())
                    os.close(int(ready_fd))
                    ready_fd = None
                log.log(
                    logging.INFO if word == READY else logging.ERROR,
                    "%s. Kafka on %s, model server on %s%s. `tentalis status` shows the processes, Ctrl-C or "
                    "`tentalis down` stops them",
                    *(word, stack.settings.bootstrap, stack.server),
                    f", gateway on {stack.gateway}/v1" if stack.gateway else "",
                )
        finally:
            supervisor.stop()
        if halted := supervisor.halted():
            raise CommandError("\n".join(f"{name}: {why}" for name, why in halted.items()), NEEDS_PERSON)


def _word(staying: dict[str, dict[str, Any]]) -> str | None:
    """`ready`, or which processes are not and will not be by themselves; None while some are still on their way."""
    settled = all(one["state"] in ("ready", "degraded", "halted") for one in staying.values())
    stuck = [f"{name}: {one['message']}" for name, one in staying.items() if one["state"] != "ready"]
    return None if not settled else f"not ready: {'; '.join(stuck)}" if stuck else READY


def _policy_of(run: Path) -> str:
    """The policy that a run trains."""
    from trainer.config_file import load_config

    return load_config(run).policy


def _standing_run(runs: Path, policy_model: str | None, cache: Path) -> tuple[Path, Path, str]:
    """Model folder, trainer configuration and environment of what was begun last in this state directory, without an
    end: what it has learned goes on being served and trained. A new run where there is none, or one of another model.
    """
    from tentalis.demo.runs import newest
    from tentalis.inference.models import resolve_model
    from tentalis.scenarios import make_scenario
    from trainer.config import TrainerConfig, given_text
    from trainer.config_file import load_config

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
    path.write_text(given_text(config), encoding="utf-8")
    return model, path, environment


def _detached(home: Path, policy_model: str | None, config: Path | None, ranks: int, gateway: bool) -> None:
    from tentalis.local.state import StateDir

    state = StateDir(home)
    if state.holder() is not None:
        raise CommandError(f"a stack runs in {home} already; `tentalis status` shows it")
    sink_path = home / "logs" / "up.log"
    command = [sys.executable, "-m", "tentalis.cli", "up"]
    command += ["--policy-model", policy_model] if policy_model else []
    command += ["--config", str(config)] if config else []
    command += ["--ranks", str(ranks)]
    command += ["--gateway"] if gateway else []
    try:
        state.folder("logs")
        sink = sink_path.open("ab")
    except OSError as error:
        raise CommandError(f"cannot use {home}: {error}. Choose another directory with TENTALIS_HOME") from error
    read_end, write_end = os.pipe()
    with sink:
        begin = sink.tell()
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
    try:
        heard, _, _ = select.select([read_end], [], [], READY_TIMEOUT)
    except KeyboardInterrupt:  # it is in a session of its own, and would not hear of it
        process.terminate()
        process.wait()
        raise
    word = os.read(read_end, select.PIPE_BUF).decode(errors="replace") if heard else ""
    os.close(read_end)
    if not heard:
        raise CommandError(f"not ready after {READY_TIMEOUT:g} s; it goes on, see `tentalis status` and {sink_path}")
    if not word:
        code = process.wait(30)
        if code in (0, STOPPED):
            raise CommandError("the stack was stopped before everything was ready")
        said = sink_path.read_bytes()[begin:][-2000:].decode(errors="replace")
        raise CommandError(f"the stack ended with exit code {code}; the end of {sink_path}:\n{said}", code)
    if word != READY:
        raise CommandError(f"{word}. The stack runs: `tentalis status` shows the processes, `tentalis down` stops them")
    typer.echo("ready: `tentalis status` shows the processes, `tentalis down` stops them", err=True)


def down() -> None:
    """Stops the local stack cleanly and leaves its data."""
    from tentalis.local.state import request_stop

    home = resolve_settings(join_stack=False).home
    pid = request_stop(home)
    typer.echo(f"no stack runs in {home}" if pid is None else f"stopped the stack in {home} (process {pid})", err=True)


def status(output: Format = Output.TABLE) -> None:
    """The processes of the local stack; each port answers /healthz, /readyz and /metrics.

    Exits with 1 if none runs, one does not work, or the disk is full."""
    from tentalis.local.disk import FULL, space
    from tentalis.local.state import StateDir

    home = resolve_settings(join_stack=False).home
    found: dict[str, Any] = StateDir(home).status() or {"running": False, "processes": {}}
    # Looked at here: on a full disk the supervisor cannot write what it sees.
    shortage = space(home).shortage(FULL)
    if output is Output.JSON:
        print_json({"home": str(home), "shortage": shortage, **found})
    elif not found["running"]:
        print(f"no stack runs in {home}")
    else:
        print_table(
            ("process", "state", "pid", "port", "uptime", "restarts", "last exit", "message"),
            [
                (
                    name,
                    p["state"],
                    p["pid"],
                    p.get("port"),
                    _seconds(p["uptime"]),
                    p["restarts"],
                    p["last_exit"],
                    _line(p["message"]),
                )
                for name, p in found["processes"].items()
            ],
        )
        if (age := time.time() - found["updated"]) > STALE_S:
            print(f"\nthis is how it was {age:.0f} s ago: the supervisor has not written its status since then")
    if shortage is not None and output is not Output.JSON:
        print(f"\n{shortage}: make room, and what waits for it goes on by itself")
    if not found["running"] or shortage or any(p["state"] in _BAD for p in found["processes"].values()):
        raise typer.Exit(ERROR)


def _seconds(uptime: float | None) -> str | None:
    return None if uptime is None else f"{uptime:.0f} s"


def _line(message: str) -> str | None:
    return message.splitlines()[0] if message else None
