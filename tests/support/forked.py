"""Trainers forked from a process with their libraries loaded: importing these takes longer than the tests' training.

They are separate processes: they read their own environment, have their own clients, and can be killed and frozen.
Other tests run `python -m trainer` as a command, without the preloaded libraries.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from schemas import topics
from tentalis.service import logs
from tentalis.service.settings import Settings
from tests.support.commit_points import stop_at
from trainer.distributed.rank_place import STORE_IS_SERVED

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.forked_preload"])


def start(
    run: Callable[[str], int], argument: str, environment: Mapping[str, str], out: Path, err: Path
) -> ForkServerProcess:
    """Runs `run(argument)` in a new process, which exits with its result. Appends its output to the two files."""
    for path in (out, err):
        path.touch()
    process = _CONTEXT.Process(target=_child, args=(run, argument, dict(environment), out, err), daemon=True)
    process.start()
    return process


def rank_environment(port: int, rank: int, ranks: int) -> dict[str, str]:
    """The variables with which a launcher on this machine starts a rank. `port`: of its store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STORE_IS_SERVED: "True",
    }


def end(process: ForkServerProcess) -> None:
    """Sends SIGKILL if the process still runs, and waits for it."""
    process.kill()
    process.join()


def preload() -> None:
    """Waits until the process from which others are forked has loaded the libraries: minutes on a busy machine."""
    process = _CONTEXT.Process(target=os.getpid)
    process.start()
    process.join()


def train(argument: str) -> int:
    """Trains with one rank. The first line of `argument` is the configuration file; further lines are options
    (`steps=3`, `caught_up`, `port=9100` for metrics, `unbounded`: plans like a release without bounds) and points at
    which the process sends itself a signal or gets an error (tests/support/commit_points.py), such as `SIGKILL at saved
    2` or `ENOSPC at save 2`."""
    from trainer.run.launch import launch
    from trainer.run.stop_condition import StopCondition

    config, *options = argument.splitlines()
    known = ("steps=", "port=", "caught_up", "unbounded")
    if unknown := [option for option in options if " at " not in option and not option.startswith(known)]:
        raise ValueError(f"a forked trainer has no options {unknown}")
    for name, has_point, point in (option.partition(" at ") for option in options):
        if has_point:
            stop_at(point, name)
    if "unbounded" in options:
        from trainer.data import candidates
        from trainer.step import culprits

        candidates.out_of_bounds = culprits.out_of_bounds = lambda _: None
    numbers = {name: int(value) for name, equals, value in (option.partition("=") for option in options) if equals}
    stop_condition = StopCondition(numbers.get("steps"), caught_up="caught_up" in options)
    return launch(Path(config), ranks=1, metrics_port=numbers.get("port"), stop_condition=stop_condition)


def replay(run_id: str) -> int:
    """Replays a run and prints the report as JSON."""
    from tentalis.cli.shared.output import OutputFormat, emitter
    from trainer.replay.show import main

    return main(Settings.from_env(), run_id, emit=emitter(OutputFormat.JSON))


def commands(wanted: str) -> int:
    """Runs several commands, given as a JSON array of their arguments; prints exit code, stdout and stderr of each as a
    JSON line."""
    from typer.testing import CliRunner

    from tentalis.cli.main import app

    for arguments in json.loads(wanted):
        done = CliRunner().invoke(app, arguments)
        print(json.dumps([done.exit_code, done.stdout, done.stderr]))
    return 0


def _child(run: Callable[[str], int], argument: str, environment: Mapping[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    topics.table.cache_clear()  # a variable may set its number of partitions
    for path, stream in ((out, 1), (err, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream)
    logs.configure()
    sys.exit(run(argument))
