"""`python -m trainer`: the command that the launcher, torchrun or a scheduler starts as a rank."""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from tentalis.service import logs, stdout
from tentalis.service.error_messages import explain, is_foreseen
from tentalis.service.exit_codes import ExitCode
from tentalis.service.imports import without_collections
from tentalis.service.settings import Settings
from trainer.config.file import load_config
from trainer.distributed.rank_place import rank_place
from trainer.distributed.stop import stop_on_signals
from trainer.run.launch import launch, training_settings
from trainer.run.stop_condition import StopCondition

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs one rank and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("--launcher", type=int, help="id of the process that starts the ranks, with which they end")
    commands = parser.add_subparsers(dest="command", required=True)
    train_parser = commands.add_parser("train", help="train live")
    train_parser.add_argument("--config", type=Path, required=True)
    train_parser.add_argument("--ranks", type=int, default=1)
    train_parser.add_argument("--metrics-port", type=int, help="port of rank 0 for /healthz, /readyz and /metrics")
    train_parser.add_argument("--steps", type=int, help="end after this many steps of this start")
    train_parser.add_argument(
        "--until-caught-up", action="store_true", help="end when no full batch is left on the log"
    )
    rank_parser = commands.add_parser("replay-rank", help="one rank of a replay")
    rank_parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    if options.launcher is not None:
        _die_with_the_launcher(options.launcher)
    logs.configure()
    stdout.reserve()
    with stdout.libraries_to_stderr():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        if options.command == "replay-rank":
            from trainer.replay.job import replay_rank

            return replay_rank(options.spec)
        stop_condition = StopCondition(options.steps, options.until_caught_up)
        if options.ranks == 1 and rank_place().given:
            return _run_rank(options, stop_condition)
        return launch(options.config, options.ranks, options.metrics_port, stop_condition)
    except Exception as error:
        if not is_foreseen(error):
            raise
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        return code


def _run_rank(options: argparse.Namespace, stop_condition: StopCondition) -> int:
    # The imports take seconds; signals must be handled before.
    with stop_on_signals() as stop:
        config = load_config(options.config)
        # The launcher has asked the broker before it started this rank.
        settings = training_settings() if options.launcher is None else Settings.from_env()
        with without_collections():
            from torch.distributed import DistError

            from trainer.run.loop import run

        try:
            return run(config, settings, stop, options.metrics_port, stop_condition)
        except DistError as error:
            print(f"error: another rank has ended, or cannot be reached: {error}", file=sys.stderr)
            return ExitCode.ERROR


def _die_with_the_launcher(launcher: int) -> None:
    """Makes this rank die with its launcher, because a rank without one has lost its peers. Linux only; elsewhere the
    rank notices when it next uses the channel."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(ExitCode.ERROR)


if __name__ == "__main__":
    sys.exit(main())
