"""Trainers forked from a process that has their libraries loaded: to import them takes longer than what they do here.

Processes of their own all the same: they read their environment, have their own clients, are killed and frozen. That
`python -m trainer` begins from nothing is shown by the tests that run it as a command.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tentalis import logs
from tentalis.config import Settings
from tests.commit_points import stop_at

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.forked_preload"])


def start(
    run: Callable[[str], int], argument: str, environment: Mapping[str, str], out: Path, err: Path
) -> ForkServerProcess:
    """`run(argument)` in a process of its own, which ends with what that returns. Appends to the two files."""
    for path in (out, err):
        path.touch()
    process = _CONTEXT.Process(target=_child, args=(run, argument, dict(environment), out, err), daemon=True)
    process.start()
    return process


def end(process: ForkServerProcess) -> None:
    """SIGKILL, if it still runs."""
    process.kill()
    process.join()


def train(argument: str) -> int:
    """One rank, of a configuration file; on further lines what a person gives by hand: `steps=3`, `caught_up`,
    `port=9100` (for metrics); and where the process sends itself a signal (tests/commit_points.py): `SIGKILL at saved
    2`."""
    from trainer.goal import Goal
    from trainer.launch import launch

    config, *by_hand = argument.splitlines()
    for name, at, point in (each.partition(" at ") for each in by_hand):
        if at:
            stop_at(point, signal.Signals[name])
    given = {name: int(value) for name, equals, value in (each.partition("=") for each in by_hand) if equals}
    goal = Goal(given.get("steps"), caught_up="caught_up" in by_hand)
    return launch(Path(config), ranks=1, metrics_port=given.get("port"), goal=goal)


def replay(run_id: str) -> int:
    """Prints the report as JSON."""
    from trainer.replay_show import main

    return main(Settings.from_env(), run_id, as_json=True)


def commands(wanted: str) -> int:
    """Several commands, a JSON array of their arguments; prints exit code, stdout and stderr of each as a JSON line."""
    from typer.testing import CliRunner

    from tentalis.cli.main import app

    for arguments in json.loads(wanted):
        done = CliRunner().invoke(app, arguments)
        print(json.dumps([done.exit_code, done.stdout, done.stderr]))
    return 0


def _child(run: Callable[[str], int], argument: str, environment: Mapping[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((out, 1), (err, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream)
    logs.configure()
    sys.exit(run(argument))
